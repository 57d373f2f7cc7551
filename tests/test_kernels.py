"""Optional kernels: used when requested and available, refused otherwise, equal within bounds."""

import sys
from pathlib import Path

import pytest
import torch
from entry_points import REPOSITORY, TINY, refuse, train
from sharding import random_batch, random_model, small_config, total_loss
from torch import nn

from lmscale.kernels import Kernels, apex_problem
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.training.kernel_choice import check_cuda_graphs, choose_kernels

TRAIN = REPOSITORY / "src" / "train.py"
FAKES = Path(__file__).parent / "fake_apex"


@pytest.fixture
def nvidia(monkeypatch):
    """A fake of NVIDIA's apex with the parts that we use, on the path of this process."""
    monkeypatch.syspath_prepend(str(FAKES / "nvidia"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("apex", "fused_layer_norm_cuda")]:
        del sys.modules[name]


# Both compute statistics in at least fp32; a bf16 output is rounded once to 8 bits, and the next layer starts from it.
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_apex_gives_the_loss_and_gradients_of_torch(
    nvidia, architecture: str, dtype: torch.dtype, bound: float
) -> None:
    config = small_config(architecture)
    plain = random_model(config, ParallelContext()).to(dtype)
    fused = build_model(config, ParallelContext(), seed=None, dtype=dtype, kernels=Kernels("apex"))
    fused.load_state_dict(plain.state_dict())
    losses = [total_loss(model, random_batch(config)) for model in (plain, fused)]
    for loss in losses:
        loss.backward()
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    heads = 1 if architecture == "gpt" else 2  # after the stack and in the masked-LM head
    assert fused_layer_norm_affine.calls == 2 * config.num_layers + heads
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=bound)
    gradients = [nn.utils.parameters_to_vector(p.grad.double() for p in m.parameters()) for m in (plain, fused)]
    assert (gradients[1] - gradients[0]).norm() < bound * gradients[0].norm()


def test_apex_is_used_when_requested_and_by_auto_on_a_gpu(nvidia) -> None:
    for compiles in ("auto", False):
        assert choose_kernels(kernels="apex", compiles=compiles, on_gpu=True) == ("apex", False)
    assert choose_kernels(kernels="auto", compiles=False, on_gpu=True) == ("apex", False)
    assert choose_kernels(kernels="auto", on_gpu=True) == ("torch", True)  # fuses LayerNorm
    assert (
        choose_kernels(kernels="auto", on_gpu=False) == choose_kernels(compiles=False, on_gpu=True) == ("torch", False)
    )
    with pytest.raises(ValueError, match="`kernels` must be torch or auto on a CPU, .* but is apex"):
        choose_kernels(kernels="apex", on_gpu=False)
    with pytest.raises(ValueError, match="`kernels` must be torch or auto with compile=true, .* but is apex"):
        choose_kernels(kernels="apex", on_gpu=True, compiles=True)


def test_apex_without_its_extension_is_refused(nvidia, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)
    with pytest.raises(ValueError, match="without its CUDA extensions"):
        choose_kernels(kernels="apex", on_gpu=True)


def test_the_apex_of_pypi_is_recognised_and_not_imported(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FAKES / "unrelated"))
    with pytest.raises(ValueError, match="fake_apex/unrelated/apex/__init__.py is PyPI's web package, not NVIDIA's"):
        choose_kernels(kernels="apex", on_gpu=True)
    assert choose_kernels(kernels="auto", on_gpu=True, compiles=False) == ("torch", False)


def test_layers_are_compiled_on_a_gpu_by_default() -> None:
    chosen = {(c, gpu): choose_kernels(compiles=c, on_gpu=gpu)[1] for c in (True, False, "auto") for gpu in (0, 1)}
    assert {case for case, compiles in chosen.items() if compiles} == {(True, 0), (True, 1), ("auto", 1)}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"on_gpu": False}, "on a CPU"),
        ({"kernels": Kernels(cuda_graphs=True)}, "where layers are not compiled"),
        ({"dtype": "fp32"}, "with precision=fp32, whose gradients stay"),
        ({"recompute": "full"}, "with model.recompute=full"),
        ({"tp_size": 2}, "with parallel.tp_size=2"),
        ({"pp_size": 2}, "with parallel.pp_size=2"),
    ],
)
def test_cuda_graphs_are_refused_where_unsupported(changes: dict, reason: str) -> None:
    settings = {
        "kernels": Kernels(compiles=True, cuda_graphs=True),
        "on_gpu": True,
        "dtype": "bf16",
        "recompute": "none",
        "tp_size": 1,
    }
    check_cuda_graphs(**settings)
    with pytest.raises(ValueError, match=f"`cuda_graphs` must be false {reason}.*, but is true"):
        check_cuda_graphs(**settings | changes)
    check_cuda_graphs(**settings | changes | {"kernels": Kernels(compiles=True)})


@pytest.mark.skipif(apex_problem() is None, reason="NVIDIA's apex is installed")
def test_a_run_without_apex_is_refused_in_one_line_before_anything_starts(tmp_path) -> None:
    done = refuse(TRAIN, *TINY, "kernels=apex", f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: `kernels` must be torch or auto here, because ")
    assert "nvidia-apex" in done.stderr and done.stderr.count("\n") == 1


def test_a_run_reports_the_chosen_kernels_and_refuses_those_of_a_gpu(tmp_path) -> None:
    done = train(*TINY, "kernels=auto", f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    line = "kernels: layers not compiled, LayerNorm by torch, attention by sdpa (compile=auto: eager, kernels=auto)\n"
    assert line in done.stdout
    done = refuse(TRAIN, *TINY, "cuda_graphs=true", "trainer.accelerator=cpu")
    assert done.returncode == 2 and "`cuda_graphs` must be false on a CPU, but is true" in done.stderr


def test_the_compiler_keeps_every_graph_of_a_layer() -> None:
    """Beyond its limit, 8 in torch, a layer runs eagerly, with a warning only."""
    settings = torch._dynamo.config
    config = small_config("bert", norm_order="mix")
    kinds_of_layers, with_and_without_mask, batches = 2, 2, 3  # of training, of validation, and its last
    with settings.patch(recompile_limit=8):  # pytest's monkeypatch would leave them deleted
        build_model(config, ParallelContext(), seed=None, kernels=Kernels(compiles=True))
        assert settings.recompile_limit >= kinds_of_layers * with_and_without_mask * batches
