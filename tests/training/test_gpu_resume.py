"""On a GPU, a stopped run with recomputed attention dropout resumes bitwise."""

import pytest
import torch
from runs import assert_same_run, read_rows, tiny_run

from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# Recomputation must repeat the dropout of the forward pass, and a resumed run must draw the same dropout as an
# uninterrupted one. A compiled graph with its own generator passes the first check and fails the second.
@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_recomputed_run_with_attention_dropout_resumes_bitwise(tmp_path, recompute, compile_) -> None:
    settings = {
        "trainer__accelerator": "gpu",
        "trainer__max_steps": 6,
        "precision__dtype": "bf16",
        "deterministic": True,
        "model__hidden_size": 64,
        "model__recompute": recompute,
        "model__hidden_dropout": 0.1,
        "model__attention_dropout": 0.3,
        "data__seq_length": 32,
        "compile": compile_,
    }
    pretrain(resolve(tiny_run("gpt", tmp_path / "whole", **settings)))
    for stop in (3, None):
        torch.compiler.reset()  # compile again for each part, as after a real restart
        run = tiny_run("gpt", tmp_path / "parts", trainer__stop_after_steps=stop, resume="auto", **settings)
        job = resolve(run)
        assert job.kernels.compiles == compile_
        pretrain(job)
    assert len(read_rows(tmp_path / "whole")) >= 6
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
