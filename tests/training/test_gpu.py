"""The same runs on a GPU; skipped where there is none."""

import pytest
import torch
from runs import read_rows, tiny_run

from lmscale.training.pretrain import prepare_job, pretrain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_a_gpu_follows_the_cpu_in_fp64(tmp_path, architecture) -> None:
    dropout = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1, "model__attention": "exact"}
    for accelerator in ("cpu", "gpu"):
        run = tiny_run(architecture, tmp_path / accelerator, trainer__accelerator=accelerator, **dropout)
        pretrain(prepare_job(run))
    for row, other in zip(read_rows(tmp_path / "cpu"), read_rows(tmp_path / "gpu"), strict=True):
        assert other["train/loss"] == pytest.approx(row["train/loss"], rel=1e-10)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-9)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_learns_on_a_gpu_and_resumes_bitwise(tmp_path, dtype) -> None:
    settings = {
        "trainer__accelerator": "gpu",
        "trainer__max_steps": 20,
        "precision__dtype": dtype,
        "precision__initial_loss_scale": 2.0**12,
        "deterministic": True,
        "model__hidden_dropout": 0.1,
        "model__attention_dropout": 0.1,
    }
    pretrain(prepare_job(tiny_run("gpt", tmp_path / "whole", **settings)))
    for stop in (7, None):
        run = tiny_run("gpt", tmp_path / "parts", trainer__stop_after_steps=stop, resume="auto", **settings)
        pretrain(prepare_job(run))
    whole, parts = ([row["train/loss"] for row in read_rows(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts
    assert whole[-1] < whole[0] - 0.05
