"""What `check` resolves on simulated GPUs: the layout and the recomputation, for the kernels of the run."""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composed import CONF, composed_run
from entry_points import slurm_task
from lightning.pytorch.utilities import rank_zero_only
from runs import tiny_run, train_here

from lmscale.checkpoint import Checkpoint
from lmscale.config import Layout
from lmscale.config.layout import ParallelConfig
from lmscale.config.pretrain import RunConfig
from lmscale.data.sampler import Blend, RunSamples
from lmscale.planner import memory
from lmscale.planner.memory import checkpoint_bytes, estimate_memory, usable_bytes
from lmscale.planner.workload import Workload
from lmscale.runtime import accelerator
from lmscale.runtime.world import World
from lmscale.training import agreement, capacity, pretrain, resolve, resuming
from lmscale.training.announcement import describe_idle_gpus
from lmscale.training.session import new_trainer


@pytest.fixture
def gpu_of(monkeypatch) -> Callable[[int], None]:
    """Simulates eight GPUs with this many bytes each for a rank's tensors, as far as `check` looks at them."""

    def simulate(usable: int) -> None:
        monkeypatch.setattr(capacity, "device_memory", lambda _: usable - usable_bytes(0, True))

    monkeypatch.setattr(accelerator, "resolve_accelerator", lambda requested: "gpu")
    monkeypatch.setattr(accelerator, "set_allocator", lambda cuda_graphs: None)
    monkeypatch.setattr(accelerator, "check_products", lambda dtype: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    return simulate


def test_the_layout_is_chosen_for_the_memory_of_the_kernels_that_auto_chose(tmp_path, gpu_of) -> None:
    changes = {"optimizer__moments": "bf16", "precision__dtype": "bf16", "micro_batch_size": 1}
    run = tiny_run("gpt", tmp_path, compile="auto", parallel__tp_size="auto", **changes)
    job = Workload.of(run)
    eager, compiled = (
        estimate_memory(dataclasses.replace(job, compiles=compiles), Layout()).total for compiles in (False, True)
    )
    assert compiled < eager  # whose update of bf16 moments has temporaries
    gpu_of(compiled)
    checked = resolve.check(run)
    assert (checked.layout.tp_size, checked.kernels.compiles) == (1, True)
    gpu_of(eager - 1)
    assert resolve.check(dataclasses.replace(run, compile=False)).layout.tp_size == 2


def test_the_fewest_stages_that_fit_are_chosen(tmp_path, gpu_of) -> None:
    run = tiny_run("gpt", tmp_path, parallel__pp_size="auto", micro_batch_size=1)
    needs = {pp: estimate_memory(Workload.of(run), Layout(pp_size=pp)).total for pp in (1, 2)}
    assert needs[2] < needs[1]
    for usable, pp_size in ((needs[1], 1), (needs[1] - 1, 2), (needs[2], 2)):
        gpu_of(usable)
        assert resolve.check(run).layout == Layout(pp_size=pp_size)
    gpu_of(needs[2] - 1)
    with pytest.raises(ValueError, match=r"^no pp_size fits \(`parallel.pp_size`=auto\): no layout divides the model"):
        resolve.check(run)


def test_recomputation_is_chosen_for_the_memory_of_the_attention_that_a_resumed_run_keeps(
    tmp_path, monkeypatch, gpu_of
) -> None:
    run = tiny_run(
        "gpt", tmp_path, precision__dtype="bf16", model__attention="auto", model__recompute="auto", resume="auto"
    )
    before = SimpleNamespace(run={"trainer": {"accelerator": "gpu"}}, model={"attention": "exact"})
    before.step, before.state = 1, {}
    monkeypatch.setattr(resuming, "find_checkpoint", lambda run: Checkpoint(tmp_path, before))
    job = Workload.of(run, attention="exact")
    none, selective = (estimate_memory(job.change(recompute=mode), Layout()).total for mode in ("none", "selective"))
    assert selective < none
    gpu_of(none - 1)  # enough for a fused core
    model = resolve.check(run).model
    assert (model.attention, model.recompute) == ("exact", "selective")


def test_a_resumed_run_decides_everything_once_in_the_command_and_again_on_a_rank_only_what_others_may_change(
    tmp_path, monkeypatch
) -> None:
    run = tiny_run("gpt", tmp_path, resume="auto", trainer__stop_after_steps=2)
    train_here(run)
    longer = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, stop_after_steps=None))
    calls = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: calls.update([name]) or original(*given))

    count(resuming, "find_checkpoint")
    for owner in (resuming, agreement):
        count(owner, "check_resumable")
    count(RunConfig, "check_layout")
    count(resolve, "resolve_kernels")
    count(memory, "estimate_memory")
    resolved = resolve.resolve(longer)
    once = ("find_checkpoint", "check_resumable", "check_layout", "resolve_kernels", "estimate_memory")
    assert calls == dict.fromkeys(once, 1)
    calls.clear()
    assert pretrain.pretrain(resolved) == 0
    # Another job may have written checkpoints until the lock.
    assert calls == {"find_checkpoint": 1, "check_resumable": 1}


def test_a_layout_that_auto_chose_is_estimated_once(tmp_path, monkeypatch, gpu_of) -> None:
    run = tiny_run("gpt", tmp_path, precision__dtype="bf16", parallel__tp_size="auto", model__recompute="auto")
    estimate, estimated = memory.estimate_memory, []
    monkeypatch.setattr(memory, "estimate_memory", lambda *given: estimated.append(given) or estimate(*given))
    gpu_of(estimate(Workload.of(run), Layout(tp_size=2)).total)
    assert resolve.check(run).layout.tp_size == 2
    assert [layout.tp_size for _, layout in estimated] == [1, 2]


@pytest.mark.parametrize(
    "gpus, batch, dp_size", [(8, (8, 16), 2), (8, (2, 16), 8), (6, (4, 512), 4), (1, (8, 16), 1), (8, (32, 32), 1)]
)
def test_dp_size_auto_takes_as_many_gpus_as_the_batch_allows(
    tmp_path, monkeypatch, gpu_of, gpus: int, batch: tuple[int, int], dp_size: int
) -> None:
    gpu_of(2**40)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    micro, whole = batch
    run = tiny_run("gpt", tmp_path, precision__dtype="bf16", micro_batch_size=micro, global_batch_size=whole)
    run = dataclasses.replace(run, parallel=ParallelConfig())
    layout = resolve.check(run).layout
    assert layout == Layout(tp_size=1, dp_size=dp_size)
    said = describe_idle_gpus(SimpleNamespace(request=run, layout=layout, on_gpu=True))
    number = (
        f"dp_size=auto: {dp_size} of {gpus} GPUs, because it must divide the {whole // micro} micro-batches of a step"
    )
    assert said == ("" if dp_size == gpus else f"; {number}")


@pytest.mark.parametrize("gpus, layout", [(8, Layout(tp_size=1, dp_size=2)), (6, Layout(tp_size=4, dp_size=1))])
def test_gpus_that_another_launcher_or_the_tensor_ranks_leave_are_not_put_down_to_the_batch(
    tmp_path, monkeypatch, gpus: int, layout: Layout
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    run = tiny_run("gpt", tmp_path, micro_batch_size=4, global_batch_size=512)
    run = dataclasses.replace(run, parallel=ParallelConfig())
    assert describe_idle_gpus(SimpleNamespace(request=run, layout=layout, on_gpu=True)) == ""


def test_zero1_whose_saves_the_host_cannot_hold_is_refused(tmp_path, monkeypatch, gpu_of) -> None:
    gpu_of(2**40)
    run = tiny_run("gpt", tmp_path, parallel__dp_size=2, parallel__zero1=True)
    needed = 2 * (checkpoint_bytes(Workload.of(run, on_gpu=True), Layout(dp_size=2)) - usable_bytes(0, False))
    monkeypatch.setattr(capacity, "host_memory_available", lambda: needed)
    assert resolve.check(run).layout.zero1
    monkeypatch.setattr(capacity, "host_memory_available", lambda: needed - 2)
    with pytest.raises(ValueError, match="`parallel.zero1` must be false where the host"):
        resolve.check(run)


def test_the_ranks_of_one_host_share_its_memory(tmp_path, monkeypatch) -> None:
    run, layout = tiny_run("gpt", tmp_path, parallel__dp_size=4, micro_batch_size=2), Layout(dp_size=4)
    sequence = capacity.SAMPLE_OVERHEAD_BYTES + 2 * 2 * 8 * 33  # tokens and labels
    monkeypatch.setattr(capacity, "host_memory_available", lambda: 4 * sequence)
    capacity.check_host(run, layout, World("srun", size=4, local_size=2))
    for world in (World("srun", size=4, local_size=4), None):
        with pytest.raises(ValueError, match="`global_batch_size` must be at most 4, .* but is 8$"):
            capacity.check_host(run, layout, world)


def test_dp_size_auto_uses_every_rank_that_another_launcher_started(tmp_path, monkeypatch, gpu_of) -> None:
    gpu_of(2**40)
    world = World("srun", 8, 8, 0, 0)
    sizes = {"micro_batch_size": 8, "global_batch_size": 16}
    run = dataclasses.replace(tiny_run("gpt", tmp_path, precision__dtype="bf16", **sizes), parallel=ParallelConfig())
    with pytest.raises(ValueError, match=r"`global_batch_size` must be a multiple .* \(8 x 8\), but is 16"):
        resolve.check(run, world)
    assert resolve.check(dataclasses.replace(run, micro_batch_size=2), world).layout == Layout(tp_size=1, dp_size=8)


def test_auto_takes_one_tensor_rank_for_an_odd_micro_batch_in_halves_or_the_run_is_refused(tmp_path, gpu_of) -> None:
    sizes = {"micro_batch_size": 3, "global_batch_size": 6, "parallel__tp_size": "auto", "parallel__batch_halves": True}
    run = tiny_run("gpt", tmp_path, precision__dtype="bf16", **sizes)
    needed = estimate_memory(Workload.of(run), Layout()).total
    gpu_of(needed)
    assert resolve.check(run).layout == Layout(tp_size=1, dp_size=1, batch_halves=True)
    gpu_of(needed - 1)
    with pytest.raises(ValueError, match="^`micro_batch_size` must be even with `parallel.batch_halves`, but is 3$"):
        resolve.check(run)
    even = dataclasses.replace(run, micro_batch_size=2)
    gpu_of(estimate_memory(Workload.of(even), Layout()).total - 1)
    assert resolve.check(even).layout == Layout(tp_size=2, dp_size=1, batch_halves=True)


@pytest.mark.parametrize(
    ("variables", "size", "rank"),
    [(slurm_task(1, "29000"), 2, 1), ({"LOCAL_RANK": "1", "RANK": "x", "NODE_RANK": "3", "MASTER_PORT": "x"}, 1, 0)],
    ids=["srun", "left over"],
)
def test_torch_and_lightning_find_the_ranks_that_were_started(monkeypatch, tmp_path, variables, size, rank) -> None:
    monkeypatch.setattr(os, "environ", dict(variables))
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # the trainer sets it to its rank, for every later test
    trainer = new_trainer(tiny_run("gpt", tmp_path), Layout(), "cpu")
    found = trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.strategy.launcher
    assert found == (size, rank, rank, 0, None)
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == (str(size), str(size))
    assert os.environ["MASTER_PORT"] == variables["MASTER_PORT"]


def test_ranks_that_see_only_their_own_gpu_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(accelerator, "world_from_outside", lambda: World("srun", 2, 2, 0, 0))
    monkeypatch.setattr(accelerator, "may_have_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="must see the GPUs of all 2 ranks of its node, but sees 1 .*--gpus-per-node"):
        accelerator.resolve_accelerator("auto")
    assert accelerator.resolve_accelerator("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert accelerator.resolve_accelerator("auto") == "gpu"


def test_a_run_leaves_the_determinism_that_the_environment_asks_for_and_undoes_that_of_the_run_before(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(pretrain, "new_trainer", lambda *_, **options: options["deterministic"])
    run = SimpleNamespace(request=tiny_run("gpt", tmp_path), layout=None, accelerator="cpu")
    assert pretrain.build_trainer(run) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert pretrain.build_trainer(run) is False
    finally:
        torch.use_deterministic_algorithms(False)
    run.request = dataclasses.replace(run.request, deterministic=True)
    assert pretrain.build_trainer(run) is True


PAPERS_CORPUS = 68_507 * 512 // 29  # sequences of the held-out thirtieth, Table 2


@pytest.fixture
def corpus_of(monkeypatch) -> Callable[..., None]:
    """Simulates a held-out text whose datasets, of equal weight, have these numbers of sequences."""

    def simulate(*available: int) -> None:
        def build(run, corpus, num_samples) -> RunSamples:
            samples = object.__new__(RunSamples)
            samples.validation = [range(number) for number in available]
            samples.validation_blend = Blend([1.0] * len(available))
            samples.scored = range(num_samples or sum(available))
            return samples

        monkeypatch.setattr(resolve, "samples_of", build)

    return simulate


@pytest.mark.parametrize("available", [3, 64, 76_800, PAPERS_CORPUS])
@pytest.mark.parametrize("recipe", sorted(path.stem for path in (CONF / "recipe").glob("*.yaml")))
def test_no_recipe_validates_for_long_and_each_scores_a_small_corpus_whole(recipe, available, corpus_of) -> None:
    corpus_of(available)
    run = composed_run(f"model={recipe}")
    trainer, size = run.trainer, run.global_batch_size
    most = 3 * size * trainer.validate_every_steps // 20
    assert resolve.resolve_validation(run, None, on_gpu=True) == (None if available <= most else most)


@pytest.fixture
def small_text(tmp_path) -> tuple[str, ...]:
    """Keys of a text of 16 documents, the last of which is held out."""
    sentences = [f"The {word} of day {n} was long. Then came rain." for n in range(40) for word in ("walk", "ride")]
    (tmp_path / "a.txt").write_text("\n\n".join(" ".join(sentences[n : n + 5]) for n in range(0, 80, 5)))
    return "data=local", f"data.path={tmp_path / 'a.txt'}", f"data.cache_dir={tmp_path / 'cache'}"


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_small_text_is_scored_whole_and_a_number_that_it_lacks_refused(family: str, small_text, tmp_path) -> None:
    keys = (f"model={family}_tiny", "data.seq_length=32", *small_text)
    assert resolve.resolve(composed_run(*keys, run_dir=tmp_path / "run")).num_validation_samples is None
    more = composed_run(*keys, "trainer.num_validation_samples=64", run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="^`trainer.num_validation_samples` must be at most the validation part's"):
        resolve.resolve(more)


def test_a_held_out_text_shorter_than_a_sequence_is_refused_with_the_length_that_fits(small_text, tmp_path) -> None:
    with pytest.raises(ValueError, match="^the validation part must have at least `data.seq_length`") as refused:
        resolve.resolve(composed_run(*small_text, run_dir=tmp_path / "run"))
    remedy = re.search(r"; (data.seq_length=\d+) fits$", str(refused.value))[1]
    resolve.resolve(composed_run(*small_text, remedy, run_dir=tmp_path / "run"))


@pytest.mark.parametrize("every", [0, 10, 1000])
def test_a_validation_only_at_the_ends_of_a_run_is_bounded_by_the_steps_of_the_run(every: int, corpus_of) -> None:
    corpus_of(PAPERS_CORPUS)
    run = composed_run("model=gpt_2.5b", "trainer.max_steps=10", f"trainer.validate_every_steps={every}")
    assert resolve.resolve_validation(run, None, on_gpu=True) == 768  # 5 % of 3 x 10 x 512


def test_a_bounded_validation_takes_of_each_dataset_what_its_weight_allows(corpus_of) -> None:
    run = composed_run("model=gpt_2.5b", "trainer.validate_every_steps=10")  # at most 768 sequences
    for available, number in (((384, 900), 768), ((383, 900), 766), ((100, 900), 200), ((67, 700), None)):
        corpus_of(*available)
        found = resolve.resolve_validation(run, None, on_gpu=True)
        assert found == number, available


@pytest.mark.parametrize("keys", [["num_validation_samples=null"], ["num_validation_samples=76801"]])
def test_a_longer_validation_on_a_gpu_needs_a_higher_share(keys, corpus_of) -> None:
    corpus_of(PAPERS_CORPUS)
    run = composed_run("model=gpt_2.5b", *(f"trainer.{key}" for key in keys))
    with pytest.raises(ValueError, match="^`trainer.num_validation_samples` must be at most 76,800 with trainer.max_"):
        resolve.resolve_validation(run, None, on_gpu=True)
    wanted = run.trainer.num_validation_samples
    assert resolve.resolve_validation(run, None, on_gpu=False) == wanted
    allowed = composed_run("model=gpt_2.5b", *(f"trainer.{key}" for key in (*keys, "max_validation_share=0.8")))
    assert resolve.resolve_validation(allowed, None, on_gpu=True) == wanted
