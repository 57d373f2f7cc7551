"""Runs on a GPU, compared with the CPU; skipped without a GPU."""

from pathlib import Path

import pytest
import torch
from runs import assert_same_run, read_rows, tiny_run, train_here

from lmscale.kernels import apex_problem
from lmscale.models.attention_backend import preferred_backend
from lmscale.models.layer import TransformerLayer
from lmscale.parallel import ParallelContext
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_a_gpu_run_matches_the_cpu_in_fp64(tmp_path, architecture) -> None:
    dropout = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1, "model__attention": "exact"}
    for accelerator in ("cpu", "gpu"):
        run = tiny_run(architecture, tmp_path / accelerator, trainer__accelerator=accelerator, **dropout)
        train_here(run)
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
    train_here(tiny_run("gpt", tmp_path / "whole", **settings))
    for stop in (7, None):
        run = tiny_run("gpt", tmp_path / "parts", trainer__stop_after_steps=stop, resume="auto", **settings)
        train_here(run)
    whole, parts = ([row["train/loss"] for row in read_rows(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts
    assert whole[-1] < whole[0] - 0.05


HALF = {"trainer__accelerator": "gpu", "trainer__max_steps": 20, "model__hidden_size": 64, "data__seq_length": 32}


@pytest.mark.parametrize(
    "changes", [{"compile": "auto"}, {"compile": True, "cuda_graphs": True}], ids=["auto", "graphs"]
)
@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_compiled_layers_and_cuda_graphs_match_eager_layers(tmp_path, architecture, changes) -> None:
    for name, settings in (("plain", {}), ("other", changes)):
        run = tiny_run(architecture, tmp_path / name, precision__dtype="bf16", **HALF | settings)
        job = resolve(run)
        assert job.kernels.compiles == (name == "other")
        pretrain(job)
    plain, other = ([row["train/loss"] for row in read_rows(tmp_path / name)] for name in ("plain", "other"))
    assert other == pytest.approx(plain, rel=5e-3)  # bf16 has 8 significant bits; fusion changes where it rounds
    assert other[-1] < other[0] - 0.05


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs float8")
@pytest.mark.parametrize("compile_", [False, True])
def test_float8_matches_bf16_on_a_gpu(tmp_path, compile_) -> None:
    for dtype in ("bf16", "fp8"):
        train_here(tiny_run("gpt", tmp_path / dtype, precision__dtype=dtype, compile=compile_, **HALF))
    bf16, fp8 = ([row["train/loss"] for row in read_rows(tmp_path / name)] for name in ("bf16", "fp8"))
    assert fp8 == pytest.approx(bf16, rel=5e-3) and fp8 != bf16


@pytest.mark.skipif(apex_problem() is not None, reason="needs NVIDIA's apex")
def test_apex_matches_torch_on_a_gpu(tmp_path) -> None:
    for kernels in ("torch", "apex"):
        train_here(tiny_run("gpt", tmp_path / kernels, precision__dtype="bf16", kernels=kernels, **HALF))
    torch_, apex = ([row["train/loss"] for row in read_rows(tmp_path / name)] for name in ("torch", "apex"))
    assert apex == pytest.approx(torch_, rel=5e-3)


@pytest.mark.parametrize("attention", ["flash", "efficient", "cudnn", "flash3"])
def test_a_compiled_layer_calls_the_backend_of_model_attention_and_equals_exact_attention(attention) -> None:
    if attention == "flash3":
        pytest.importorskip("flash_attn_interface")
    sizes = {"model__hidden_size": 64, "model__hidden_dropout": 0.0, "model__attention_dropout": 0.0}
    configs = [tiny_run("gpt", Path("x"), **sizes, model__attention=name).model for name in ("exact", attention)]
    torch.compiler.reset()  # the backend is chosen while tracing
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16, device="cuda")
    found, called = [], set()
    for config in configs:
        with torch.device("cuda"), preferred_backend(config.attention):
            layer = TransformerLayer(config, ParallelContext(), 0).bfloat16()
            torch.manual_seed(1)
            for weight in layer.parameters():
                torch.nn.init.normal_(weight, std=0.2)  # much attention beside the residual
            layer.compile(dynamic=False)
            entry = x.clone().requires_grad_()
            with torch.profiler.profile() as profiler:
                out = layer(entry, None, None)
                out.square().sum().backward()
        found.append([each.float() for each in (out.detach(), entry.grad)])
        called = {event.key for event in profiler.key_averages()}
    assert f"aten::_scaled_dot_product_{attention.rstrip('3')}_attention" in called
    for ours, exact in zip(*found, strict=True):
        assert (ours - exact).norm() < 0.02 * exact.norm()


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
    train_here(tiny_run("gpt", tmp_path / "whole", **settings))
    for stop in (3, None):
        torch.compiler.reset()  # compile again for each part, as after a real restart
        run = tiny_run("gpt", tmp_path / "parts", trainer__stop_after_steps=stop, resume="auto", **settings)
        job = resolve(run)
        assert job.kernels.compiles == compile_
        pretrain(job)
    assert len(read_rows(tmp_path / "whole")) >= 6
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
