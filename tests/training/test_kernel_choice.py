"""`compile=auto` and `model.attention=auto`: what they choose, that ranks agree, and that a resumed run keeps it."""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composed import composed_run as composed
from runs import assert_same_run, read_record, tiny_run, train_here
from torch.nn.attention import (
    SDPBackend,
    _cur_sdpa_kernel_backends,
    _fa3,
    current_flash_attention_impl,
    register_flash_attention_impl,
)

from lmscale.checkpoint import Checkpoint, list_checkpoints
from lmscale.config import Layout
from lmscale.kernels import PLAIN, Kernels
from lmscale.models.attention_backend import choose_fastest, fastest_backend, leave_cudnn_out, preferred_backend
from lmscale.planner.flops import model_flops_per_step
from lmscale.runtime.ranks import Ranks
from lmscale.runtime.world import World
from lmscale.training import agreement, kernel_choice
from lmscale.training.agreement import agree_on_kernels
from lmscale.training.kernel_choice import check_attention, keep_compile, resolve_attention
from lmscale.training.resolve import check, resolve
from lmscale.training.run import Run, Start


@pytest.fixture
def two_cores(monkeypatch) -> None:
    monkeypatch.setattr(kernel_choice, "usable_cores", lambda: 2)
    monkeypatch.setattr(kernel_choice, "_has_compiler", lambda on_gpu=False: True)


@pytest.fixture
def compiles(two_cores) -> Callable[..., bool]:
    """Whether a run is compiled on hosts of two cores."""

    def ask(*overrides: str, num_hosts: int = 1) -> bool:
        world = World("torchrun", size=num_hosts) if num_hosts > 1 else None
        request = composed("micro_batch_size=4", f"parallel.dp_size={num_hosts}", *overrides)
        return check(request, world).kernels.compiles

    return ask


@pytest.mark.parametrize("overrides", [("trainer.max_steps=20",), ("precision=fp64",), ("precision=fp16",)])
def test_short_runs_and_types_that_gain_nothing_stay_eager_on_a_cpu(compiles, overrides) -> None:
    assert not compiles("model=gpt_tiny", "trainer.max_steps=1000000000", *overrides)


def test_a_long_run_compiles_on_a_cpu_if_there_is_a_compiler(compiles, monkeypatch) -> None:
    def long(steps: int, num_hosts: int = 1) -> bool:
        steps = f"trainer.max_steps={steps}"
        return compiles("model=gpt_tiny", "precision=bf16", steps, "trainer.stop_after_steps=1", num_hosts=num_hosts)

    run = composed("model=gpt_tiny")
    flops = model_flops_per_step(run.model.resolve(2000), run.data.seq_length, run.global_batch_size)
    least = math.ceil(20 * 60 * 0.2e12 * 2 / flops)  # twenty minutes of two cores
    assert long(least) and not long(least - 1)
    assert long(2 * least, 2) and not long(2 * least - 2, 2)
    assert not compiles("model=gpt_tiny", f"trainer.max_steps={least}", "compile=false")
    monkeypatch.setattr(kernel_choice, "_has_compiler", lambda on_gpu=False: False)
    assert not long(least)


def test_without_a_compiler_or_headers_none_is_found(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    assert not kernel_choice._has_compiler()
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr(kernel_choice.sysconfig, "get_path", lambda *_: str(tmp_path))
    assert not kernel_choice._has_compiler()
    (tmp_path / "Python.h").write_text("")
    assert kernel_choice._has_compiler()
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    assert not kernel_choice._has_compiler(on_gpu=True)
    monkeypatch.setenv("CC", "sh")
    assert kernel_choice._has_compiler(on_gpu=True)


def test_a_job_is_prepared_with_what_its_length_and_dropout_call_for(two_cores, tmp_path, monkeypatch) -> None:
    run = tiny_run("gpt", tmp_path, compile="auto", precision__dtype="bf16", model__attention="auto")
    dropping = dataclasses.replace(run, model=dataclasses.replace(run.model, attention_dropout=0.1))
    chosen = []
    for seconds in (kernel_choice.LEAST_SECONDS, 0):
        monkeypatch.setattr(kernel_choice, "LEAST_SECONDS", seconds)
        jobs = [resolve(run), resolve(dropping)]
        chosen += [(job.kernels.compiles, job.model.attention) for job in jobs]
    assert chosen == [(False, "sdpa"), (False, "sdpa"), (True, "sdpa"), (True, "exact")]


def test_a_run_records_what_auto_chose(tmp_path) -> None:
    auto = {"model__attention": "auto", "trainer__accelerator": "auto"}
    train_here(tiny_run("gpt", tmp_path, trainer__max_steps=1, **auto))
    (checkpoint,) = list_checkpoints(tmp_path / "checkpoints")
    here = "gpu" if torch.cuda.is_available() else "cpu"
    assert Checkpoint.open(checkpoint).metadata.run["trainer"]["accelerator"] == here
    record = read_record(tmp_path)
    assert record["config"]["model"]["attention"] == "sdpa"
    assert record["kernels"] == {
        "layer_norm": "torch",
        "float8": False,
        "compiles": False,
        "cuda_graphs": False,
    }


def test_a_resumed_run_keeps_the_attention_of_its_checkpoint(tmp_path) -> None:
    settings = {"model__attention_dropout": 0.2, "resume": "auto"}
    train_here(tiny_run("gpt", tmp_path / "whole", model__attention="exact", **settings))
    for attention, stop in (("exact", 2), ("auto", None)):
        changes = {"model__attention": attention, "trainer__stop_after_steps": stop}
        train_here(tiny_run("gpt", tmp_path / "parts", **settings, **changes))
    assert read_record(tmp_path / "parts")["config"]["model"]["attention"] == "exact"
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_resumed_run_keeps_the_decision_whether_to_compile(two_cores, tmp_path, monkeypatch) -> None:
    run = tiny_run("gpt", tmp_path, compile="auto", precision__dtype="fp32", resume="auto")
    train_here(run)
    assert read_record(tmp_path)["config"]["compile"] is False
    (tmp_path / "record.json").unlink()
    monkeypatch.setattr(kernel_choice, "LEAST_SECONDS", 0)  # as on fewer cores
    resumed = resolve(run)
    assert resumed.start.resumes and not resumed.kernels.compiles
    assert resumed.compile_choice == "compile=auto: eager, as in the checkpoint"
    new = tiny_run("gpt", tmp_path / "new", compile="auto", precision__dtype="fp32")
    branch = {"path": str(resumed.start.checkpoint.path), "weights_only": True}
    for other in (new, dataclasses.replace(new, resume=dataclasses.replace(new.resume, **branch))):
        assert resolve(other).kernels.compiles
    assert resolve(new).compile_choice == "compile=auto: compiled"


def test_a_compiled_run_is_resumed_compiled_where_that_is_possible(monkeypatch) -> None:
    run = tiny_run("gpt", Path("x"), compile="auto")
    kept = SimpleNamespace(run={"compile": True})
    for there in (True, False):
        monkeypatch.setattr(kernel_choice, "_has_compiler", lambda on_gpu=False, there=there: there)
        assert keep_compile(run, False, kept) == (True if there else "auto")
    assert keep_compile(run, True, kept) is True
    assert keep_compile(dataclasses.replace(run, kernels="apex"), True, kept) == "auto"
    assert keep_compile(dataclasses.replace(run, compile=False), True, kept) is False


def run_that_measures(checkpoint: Checkpoint | None = None) -> Run:
    request = tiny_run("gpt", Path("x"), model__attention="auto")
    decided = {"accelerator": "gpu", "layout": Layout(), "batch": request.check_layout(Layout()), "kernels": PLAIN}
    start = Start(checkpoint, checkpoint is not None, 0, 0.0, request.optimizer, request.schedule)
    model = request.model.resolve(600)
    return Run(request=request, model=model, compile_choice="", measures_attention=True, start=start, **decided)


def test_only_rank_0_measures_and_decides() -> None:
    theirs = Kernels(compiles=True), "efficient", "full"
    strategy = SimpleNamespace(is_global_zero=False, ranks=SimpleNamespace(broadcast=lambda mine: theirs))
    run = agree_on_kernels(run_that_measures(), strategy)
    assert (run.model.attention, run.model.recompute, run.kernels.compiles) == ("efficient", "full", True)


@pytest.mark.parametrize("before, attention", [("gpu", "efficient"), ("cpu", "flash")])
def test_ranks_that_go_on_keep_the_attention_of_a_checkpoint_from_a_gpu(monkeypatch, before, attention) -> None:
    written = SimpleNamespace(run={"trainer": {"accelerator": before}}, model={"attention": "efficient"})
    monkeypatch.setattr(agreement, "fastest_backend", lambda *_: "flash")
    strategy = SimpleNamespace(is_global_zero=True, ranks=Ranks(), root_device=None)
    run = run_that_measures(Checkpoint(Path("x"), written))
    assert agree_on_kernels(run, strategy).model.attention == attention


def test_a_deterministic_run_on_a_gpu_measures_nothing() -> None:
    run = dataclasses.replace(tiny_run("gpt", Path("x"), model__attention="auto"), deterministic=True)
    assert resolve_attention(run, True, True, None) == "sdpa"


def test_what_this_cpu_cannot_compute_with_is_refused(monkeypatch) -> None:
    run = tiny_run("gpt", Path("x"), model__attention="flash")
    with pytest.raises(ValueError, match="`model.attention` must be sdpa, exact or auto on a CPU, but is flash"):
        resolve_attention(run, False, False, None)
    monkeypatch.setattr(kernel_choice, "_has_compiler", lambda on_gpu=False: False)
    with pytest.raises(ValueError, match="`compile` must be false or auto without a C[+][+] compiler"):
        resolve_attention(tiny_run("gpt", Path("x")), False, True, None)
    with pytest.raises(
        ValueError, match=r"`compile` must be false without a C compiler \(CC, gcc or clang\) and Python's"
    ):
        resolve_attention(tiny_run("gpt", Path("x")), True, True, None)


@pytest.mark.parametrize(
    "before, on_gpu, attention, expected",
    [
        ("gpu", True, "exact", "exact"),
        ("gpu", True, "efficient", "efficient"),
        ("cpu", True, "exact", None),  # measured there
        ("cpu", True, "sdpa", None),
        ("gpu", False, "flash", "sdpa"),
        ("gpu", False, "exact", "sdpa"),
        ("cpu", False, "exact", "exact"),
        ("auto", False, "exact", "exact"),  # of an older version
        ("auto", False, "flash", "sdpa"),
    ],
)
def test_the_attention_is_kept_on_the_same_kind_of_accelerator(before, on_gpu, attention, expected) -> None:
    written = SimpleNamespace(run={"trainer": {"accelerator": before}}, model={"attention": attention})
    start = Start(Checkpoint(Path("x"), written), True, 1, 0.0, None, None)
    run = tiny_run("gpt", Path("x"), model__attention="auto")
    assert resolve_attention(run, on_gpu, False, start.kept(on_gpu)) == expected


def test_a_backend_must_be_clearly_faster_to_replace_the_one_before_it() -> None:
    assert choose_fastest({}) == "sdpa"
    assert choose_fastest({"flash": 1.0, "efficient": 0.98}) == "flash"
    assert choose_fastest({"flash": 1.0, "efficient": 0.9}) == "efficient"
    assert choose_fastest({"efficient": 2.0}) == "efficient"


def test_flash_attention_3_takes_the_place_of_2_as_long_as_it_is_asked_for() -> None:
    calls = []
    register_flash_attention_impl("FA3", register_fn=lambda: calls.append("on") or SimpleNamespace(remove=calls.clear))
    try:
        with preferred_backend("flash3"):
            assert calls == ["on"] and current_flash_attention_impl() == "FA3"
            assert _cur_sdpa_kernel_backends() == [SDPBackend.FLASH_ATTENTION]
    finally:
        register_flash_attention_impl("FA3", register_fn=_fa3.register_flash_attention_fa3)
    assert calls == [] and current_flash_attention_impl() is None
    with pytest.raises(ModuleNotFoundError, match="flash_attn_interface"), preferred_backend("flash3"):
        pass


@pytest.mark.parametrize("attention", ["cudnn", "flash3"])
def test_kernels_without_dropout_or_masks_are_refused_where_these_occur(attention) -> None:
    changes = {"model__attention": attention}
    with pytest.raises(
        ValueError, match=rf"^`model.attention_dropout` must be 0 with attention={attention}, .* is 0.1$"
    ):
        tiny_run("gpt", Path("x"), **changes, model__attention_dropout=0.1)
    with pytest.raises(ValueError, match=rf"^`model.attention` must be .* with family=bert, .* but is '{attention}'$"):
        tiny_run("bert", Path("x"), **changes, model__attention_dropout=0.0)
    with pytest.raises(ValueError, match=f"must be sdpa, exact or auto on a CPU, but is {attention}"):
        check_attention(attention, False, "bf16")
    with pytest.raises(ValueError, match=f"must not be {attention} with precision=fp32: its kernel has half types"):
        check_attention(attention, True, "fp32")


def test_flash_attention_3_must_be_installed(monkeypatch) -> None:
    check_attention("cudnn", True, "bf16")
    with pytest.raises(ValueError, match="must not be flash3 if flash_attn_interface is not installed, but is flash3"):
        check_attention("flash3", True, "bf16")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(__spec__=object()))
    check_attention("flash3", True, "bf16")


def test_backends_that_refuse_the_inputs_are_not_chosen() -> None:
    config = tiny_run("gpt", Path("x")).model
    sizes = (1, 2, 16, torch.float32, torch.device("cpu"))
    assert fastest_backend(config, *sizes) == "flash"  # the only one of a CPU
    assert fastest_backend(dataclasses.replace(config, attention_dropout=0.1), *sizes) == "sdpa"  # and not with dropout


def test_the_preferred_backend_is_first_and_the_rest_stays_available() -> None:
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with preferred_backend("efficient"):
        order = _cur_sdpa_kernel_backends(with_priority=True)
        assert order[0] is SDPBackend.EFFICIENT_ATTENTION
        assert set(order[1:]) == {SDPBackend.FLASH_ATTENTION, SDPBackend.MATH}  # without cuDNN's
        assert torch.compiler.config.cache_key_tag == "efficient"
    with preferred_backend("cudnn"):
        leave_cudnn_out()  # as `build_model` does, which `train` calls within
        assert _cur_sdpa_kernel_backends() == [SDPBackend.CUDNN_ATTENTION]  # no other in its place
        assert torch.compiler.config.cache_key_tag == "cudnn"
    with preferred_backend("sdpa"):
        assert _cur_sdpa_kernel_backends(with_priority=True) == before
    assert torch.compiler.config.cache_key_tag == ""
