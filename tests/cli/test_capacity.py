"""Whether a run fits the memory: refused before torch is imported, with the layout that would fit."""

import time

import pytest
from entry_points import only_line, refuse

from lmscale.config import TransformerConfig
from lmscale.config.layout import Layout, ParallelConfig
from lmscale.planner.memory import checkpoint_bytes, estimate_memory, usable_bytes
from lmscale.planner.workload import Workload
from lmscale.runtime.world import World
from lmscale.training import capacity
from lmscale.training.capacity import choose_layout, choose_mode


@pytest.mark.parametrize("overrides", [(), ("parallel.tp_size=4",)], ids=["one rank", "four ranks on one host"])
def test_a_model_that_exceeds_the_memory_is_refused_within_seconds(tmp_path, monkeypatch, overrides) -> None:
    monkeypatch.setattr(capacity, "host_memory_available", lambda: 20 * 10**9)
    start = time.process_time()
    options = ("model=bert_3.9b", "trainer.accelerator=cpu", "micro_batch_size=1")
    done = refuse("src/train.py", *options, *overrides, f"hydra.run.dir={tmp_path}")
    assert time.process_time() - start < 15
    line = only_line(done.stderr)
    assert done.returncode == 2
    assert "bytes" in line and "GiB) per rank" in line and f"x {4 if overrides else 1} rank(s)" in line
    assert "parallel.tp_size=" in line.split("smallest layout that fits is ")[1]


@pytest.mark.parametrize(
    ("overrides", "free_gib", "way_out"),
    [
        (
            ["micro_batch_size=1"],
            40,
            "the smallest layout that fits is parallel.tp_size=2 parallel.dp_size=1 micro_batch_size=1 "
            "model.recompute=none on 2 host(s) with as much free memory; model.recompute=full and a smaller",
        ),
        (
            ["micro_batch_size=16"],
            20,
            "the smallest layout that fits is parallel.tp_size=4 parallel.dp_size=1 micro_batch_size=1 "
            "model.recompute=full on 4 host(s) with as much free memory",
        ),
        (
            ["micro_batch_size=16", "model.num_layers=108"],
            5,
            "the smallest layout that fits is parallel.tp_size=4 parallel.pp_size=8 parallel.dp_size=1 "
            "micro_batch_size=1 model.recompute=full on 32 host(s) with as much free memory",
        ),
        (
            ["micro_batch_size=16"],
            1,
            "no tp_size that divides this model fits hosts with as much free memory, even with micro_batch_size=1 "
            "model.recompute=full and any parallel.pp_size",
        ),
    ],
    ids=["more ranks", "least memory", "stages", "nothing"],
)
def test_a_refused_run_names_the_layout_that_fits(tmp_path, monkeypatch, overrides, free_gib, way_out) -> None:
    monkeypatch.setattr(capacity, "host_memory_available", lambda: free_gib * 2**30)
    words = ("model=gpt_2.5b", "trainer.accelerator=cpu", *overrides, f"hydra.run.dir={tmp_path}/run")
    line = only_line(refuse("src/train.py", *words).stderr)
    assert f"which has {free_gib * 2**30:,} bytes ({free_gib}.0 GiB) free; {way_out}" in line
    assert line.endswith(way_out) or "need less" in line.split(way_out)[1]


@pytest.mark.parametrize("dp_size", ["auto", 2])
def test_tp_size_auto_respects_the_host_memory(monkeypatch, dp_size) -> None:
    """On a CPU the ranks share the memory, so more ranks do not reduce the total."""
    config = TransformerConfig("gpt", 2, 64, 4, 2000, 32)
    num_ranks = 1 if dp_size == "auto" else dp_size
    job = Workload(config, 2, 2 * num_ranks, 32, "fp32", on_gpu=False)
    estimate = estimate_memory(job, Layout(dp_size=num_ranks))
    needed = (estimate.total - usable_bytes(0, on_gpu=False)) * num_ranks
    request = ParallelConfig(tp_size="auto", dp_size=dp_size)
    monkeypatch.setattr(capacity, "host_memory_available", lambda: int(1.01 * needed))
    assert choose_layout(request, job, None)[0].tp_size == 1
    monkeypatch.setattr(capacity, "host_memory_available", lambda: int(0.99 * needed))
    with pytest.raises(ValueError, match=r"no tp_size fits \(`parallel.tp_size`=auto\)"):
        choose_layout(request, job, None)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}])
def test_all_ranks_share_the_memory_of_a_host_without_gpus(monkeypatch, sizes) -> None:
    job = Workload(TransformerConfig("gpt", 2, 64, 4, 2000, 32), 2, 4, 32, "fp32", 1, on_gpu=False)
    each = estimate_memory(job, Layout(**sizes)).total - usable_bytes(0, on_gpu=False)
    monkeypatch.setattr(capacity, "host_memory_available", lambda: 2 * each)
    choose_mode("run", [job], Layout(**sizes), None)
    monkeypatch.setattr(capacity, "host_memory_available", lambda: 2 * each - 2)
    given = "tp_size 1, pp_size 2, micro_batch_size 2" if "pp_size" in sizes else "micro_batch_size 2"
    with pytest.raises(ValueError, match=rf", {given} needs .* x 2 rank\(s\) on this host"):
        choose_mode("run", [job], Layout(**sizes), None)
    choose_mode("run", [job], Layout(**sizes), World("srun", size=2, local_size=1))  # the other is elsewhere


@pytest.mark.parametrize("accelerator", ["gpu", "cpu"])
def test_the_copies_of_saves_respect_the_host_memory(monkeypatch, accelerator) -> None:
    """The copies of all local ranks; on a CPU beside the memory in which they train."""
    config, layout = TransformerConfig("gpt", 2, 64, 4, 2000, 32), Layout(tp_size=2, dp_size=2)
    job = Workload(config, 2, 4, 32, "bf16", on_gpu=accelerator == "gpu")
    each = checkpoint_bytes(job, layout) - usable_bytes(0, on_gpu=False)
    needed = estimate_memory(job, layout).total
    if accelerator == "cpu":
        each += needed
    monkeypatch.setattr(capacity, "host_memory_available", lambda: 4 * each)
    capacity.check_copies("checkpoint.async", job, layout, needed, None)
    monkeypatch.setattr(capacity, "host_memory_available", lambda: 4 * each - 4)
    with pytest.raises(ValueError, match=r"`checkpoint.async` must be false .* each of its 4 rank\(s\), but is true"):
        capacity.check_copies("checkpoint.async", job, layout, needed, None)
