"""Runs with `precision=fp8`: they learn as in bf16, resume bitwise, and are refused where unsupported."""

import pytest
from composed import composed
from runs import read_record, read_rows, tiny_run

from lmscale.config.finetune import FinetuneConfig
from lmscale.config.generate import GenerateConfig
from lmscale.config.training import PrecisionConfig
from lmscale.config.zero_shot import WikiText103Config, ZeroShotConfig
from lmscale.training.kernel_choice import check_float8
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve

SIZES = {"model__hidden_size": 32, "model__num_attention_heads": 2, "data__seq_length": 32, "precision__dtype": "fp8"}


@pytest.mark.slow
def test_a_float8_run_learns_like_bf16_and_resumes_bitwise(tmp_path) -> None:
    settings = SIZES | {"trainer__max_steps": 12, "model__hidden_dropout": 0.1}
    pretrain(resolve(tiny_run("gpt", tmp_path / "whole", **settings)))
    for stop in (5, None):
        changes = {"trainer__stop_after_steps": stop, "resume": "auto"}
        pretrain(resolve(tiny_run("gpt", tmp_path / "parts", **settings, **changes)))
    pretrain(resolve(tiny_run("gpt", tmp_path / "bf16", **settings | {"precision__dtype": "bf16"})))
    whole, parts, bf16 = ([r["train/loss"] for r in read_rows(tmp_path / n)] for n in ("whole", "parts", "bf16"))
    assert whole == parts != bf16
    assert whole[-1] < whole[0] - 0.05
    assert whole == pytest.approx(bf16, rel=2e-3)
    assert read_record(tmp_path / "whole")["config"]["precision"]["dtype"] == "fp8"


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model__hidden_size": 24},
            r"`model.hidden_size` must be a multiple of 16 x tp_size \(1\) with .*, but is 24",
        ),
        ({"parallel__tp_size": 2, "model__hidden_size": 48}, r"must be a multiple of 16 x tp_size \(2\) .*, but is 48"),
        ({"model__ffn_hidden_size": 72}, "`model.ffn_hidden_size` must be a multiple of 16 x tp_size .* but is 72"),
        (
            {"parallel__tp_size": 2, "parallel__batch_halves": True, "micro_batch_size": 2, "data__seq_length": 24},
            "must be a multiple of 32 with precision=fp8 and `parallel.batch_halves`, but is 2 x 24",
        ),
        ({"data__seq_length": 30}, "`micro_batch_size` x `data.seq_length` must be a multiple of 16 .* is 4 x 30"),
    ],
)
def test_sizes_that_are_not_multiples_of_16_are_refused(tmp_path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_run("gpt", tmp_path, **SIZES | {"model__ffn_hidden_size": None} | changes)


def test_an_older_gpu_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`precision` must be bf16 or another on a NVIDIA A100: .* 8.9 \(it has 8.0\)"
    ):
        check_float8("NVIDIA A100", (8, 0))
    check_float8("NVIDIA L4", (8, 9))
    check_float8("NVIDIA H200", (9, 0))


def test_only_pretraining_accepts_float8() -> None:
    precision, refusal = PrecisionConfig("fp8"), "`precision` must be one of fp64, fp32, bf16, fp16 outside pretraining"
    with pytest.raises(ValueError, match=refusal):
        GenerateConfig(ckpt="x", prompt="y", precision=precision)
    with pytest.raises(ValueError, match=refusal):
        ZeroShotConfig("x", WikiText103Config("wikitext103", "y"), ckpt="z", precision=precision)
    values = composed("finetune", "task=mnli", "ckpt=x", "precision=fp8", "optimizer.lr=1e-4", complete=False)
    with pytest.raises(ValueError, match=refusal):
        FinetuneConfig.from_dict(values | {"run_dir": "y"})
