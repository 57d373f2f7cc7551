"""Free memory of a GPU, without which a run is refused; no GPU is needed."""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from runs import tiny_run

from lmscale.parallel import ParallelContext
from lmscale.planner.memory import GIB, estimate_memory
from lmscale.planner.workload import Workload
from lmscale.runtime.exit_codes import USER_ERROR
from lmscale.runtime.ranks import AgreedError, Ranks
from lmscale.training import device_memory, pretrain, resolve
from lmscale.training.session import new_trainer, run_on_this_rank

TOTAL = 80 * GIB


@pytest.fixture
def gpu_with(monkeypatch) -> Callable[..., None]:
    """Simulates a GPU of 80 GiB."""

    def simulate(free: int, reserved: int = 0, **peaks: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, TOTAL))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
        for name in ("empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        for name, value in peaks.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    return simulate


def ranks(errors: list[str | None]) -> SimpleNamespace:
    """The strategy of rank 1, whose other ranks have these errors."""

    def gather(error: ValueError | None) -> list[ValueError | None]:
        first, *others = (text and ValueError(text) for text in errors)
        return [first, error, *others]

    ranks = SimpleNamespace(rank=1, is_first=False, gather=gather)
    ranks.agree = partial(Ranks.agree, ranks)
    return SimpleNamespace(parallel=ParallelContext(), ranks=ranks)


def test_a_run_is_refused_with_what_it_needs_what_is_free_and_what_there_is(gpu_with) -> None:
    gpu_with(free=70 * GIB)
    device_memory.check_free_memory(70 * GIB, ranks([None]))
    with pytest.raises(AgreedError, match=r"rank 1 needs 70.5 GiB, and 70.0 of 80.0 GiB are free"):
        device_memory.check_free_memory(70 * GIB + GIB // 2, ranks([None]))
    with pytest.raises(AgreedError, match="^rank 7"):  # all ranks end
        device_memory.check_free_memory(1, ranks([None, "rank 7"]))


def test_the_groups_have_taken_their_memory_before_it_is_read(gpu_with, monkeypatch) -> None:
    calls = []
    gpu_with(free=GIB)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _, group: calls.append(group))
    monkeypatch.setattr(device_memory, "exchange", lambda stage, *_: calls.append(stage))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: calls.append("read") or (GIB, TOTAL))
    strategy, sizes = ranks([None]), {"tp_size": 2, "dp_size": 1, "pp_size": 2, "pp_rank": 1}
    strategy.root_device = torch.device("cpu")
    strategy.parallel = SimpleNamespace(**sizes, tp_group="tensor", dp_group="data", pp_group="pipeline")
    device_memory.check_free_memory(1, strategy)
    assert calls == ["tensor", "pipeline", 0, "read"]


def test_a_run_ends_with_one_line_before_its_model_is_built(tmp_path, gpu_with, monkeypatch, capfd) -> None:
    run = resolve.resolve(tiny_run("gpt", tmp_path))
    workload = Workload.of(run.request, on_gpu=True)
    needed = estimate_memory(dataclasses.replace(workload, config=run.model), run.layout).total
    monkeypatch.setattr(pretrain, "agree", lambda run, session: run)
    monkeypatch.setattr(pretrain, "train_as_agreed", lambda *_: 0)
    on_gpu = dataclasses.replace(run, accelerator="gpu")
    for free, exit_code in ((needed, 0), (needed - 1, USER_ERROR)):
        gpu_with(free)
        trainer = new_trainer(run.request, run.layout, "cpu", max_steps=1)
        assert run_on_this_rank(run.request, trainer, lambda session: pretrain.train(on_gpu, session)) == exit_code
    assert capfd.readouterr().err.startswith("error: the memory a rank needs must be at most what is free on its GPU")


def test_the_record_has_what_was_planned_taken_and_reserved(gpu_with) -> None:
    gpu_with(free=50 * GIB, reserved=28 * GIB, max_memory_allocated=26 * GIB, max_memory_reserved=29 * GIB)
    found = {name: entry["value"] / GIB for name, entry in device_memory.memory_metrics(25 * GIB).items()}
    assert found == {
        f"gpu_memory/{name}": value
        for name, value in zip(
            ("planned", "peak_allocated", "peak_reserved", "context", "total"), (25, 26, 29, 2, 80), strict=True
        )
    }
