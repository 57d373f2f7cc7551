"""Saving, replacing, pruning, resuming and converting checkpoints survive a crash after any file operation.

Each scenario runs once to count its file operations, then once per operation, after which the process exits hard:
alone, or with all other ranks. Then every state is checked that a crash of the machine may leave at that point. What
was complete must stay complete, nothing torn may be accepted, and the same action must then succeed and clean up.
"""

import multiprocessing
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import GPT, family_config, save_random
from file_operations import CRASHED, FileOperations, count_operations, lose_unsynced, unsynced

from lmscale.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    CheckpointWriter,
    TensorEntry,
    checkpoint_step,
    divide_tensors,
    latest_checkpoint,
    list_checkpoints,
    remove_unfinished,
    write,
)
from lmscale.checkpoint import reshard as reshard_module
from lmscale.checkpoint.atomic_folder import atomic_folder
from lmscale.hugging_face import conversion as hf_conversion
from lmscale.parallel import ParallelContext
from lmscale.runtime.ranks import Ranks
from lmscale.training.callbacks.checkpointing import Checkpointing
from lmscale.training.loggers import MetricsFile
from lmscale.training.resuming import agree_on_checkpoint
from lmscale.training.run_folder import prepare_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="follows file descriptors through /proc")
RUN = SimpleNamespace(resume=SimpleNamespace(path="auto"), checkpoint=SimpleNamespace(keep_last=2, keep_best=None))
GPT_CONFIG = family_config(GPT, num_layers=1)
ROWS = "step,train/loss\n1,3.0\n2,2.0\n"
TOKENIZER = '{"version": "1.0"}'


@dataclass(frozen=True)
class Scenario:
    """An action of one or more ranks on a folder.

    Attributes:
        prepare: fills the empty folder.
        act: the action of one rank.
        check: asserts what must hold after a crash anywhere.
        result: what the finished action has made, which a crash of the machine after it must not lose.
        restart: what a new start does before its ranks act.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path, int], None]
    check: Callable[[Path], None]
    result: str
    num_ranks: int = 1
    restart: Callable[[Path], None] = lambda folder: None


def tensors_of(step: int) -> dict[str, tuple[torch.Tensor, int | None]]:
    generator = torch.Generator().manual_seed(step)
    shapes = {"model/rows": ((4, 3), 0), "model/columns": ((3, 4), 1), "model/norm": ((5,), None)}
    return {key: (torch.randn(shape, generator=generator), dim) for key, (shape, dim) in shapes.items()}


def save(folder: Path, step: int, rank: int = 0, num_ranks: int = 1, background: bool = False, seed: int = 0):
    """What a rank of a run does at a save: write, then prune."""
    tensors = tensors_of(step + seed)
    entries = {key: TensorEntry(tuple(t.shape), t.dtype, dim) for key, (t, dim) in tensors.items()}
    metadata = CheckpointMetadata(step, {"tp_size": num_ranks, "dp_size": 1}, {}, entries, {}, {}, {}, {"seed": seed})
    mine = {k: t if dim is None else t.chunk(num_ranks, dim)[rank].contiguous() for k, (t, dim) in tensors.items()}
    writer = CheckpointWriter("token", rank, num_ranks, timeout_s=60.0)
    run = SimpleNamespace(request=RUN, describe=dict, teacher=None)
    session = SimpleNamespace(folder=folder.parent, interruption=None, ending=None)
    checkpointing = Checkpointing(run, session, None, None)
    checkpointing.folder = folder
    prune = checkpointing._remove_old
    share = divide_tensors(entries, ParallelContext(rank, num_ranks))
    writer.begin(folder / f"step_{step}.ckpt", mine, metadata, share, background, prune)
    error = writer.finish()
    assert error is None, error


def read_content(path: Path) -> dict[str, list]:
    """Everything in a checkpoint that passes all checks."""
    checkpoint = Checkpoint.open(path)
    assert checkpoint.damage() is None
    metadata = checkpoint.metadata
    with checkpoint.reader() as reader:
        return {key: reader.read(key).tolist() for key in metadata.tensors} | {"state": [metadata.state]}


def expected_content(step: int, seed: int = 0) -> dict[str, list]:
    return {key: tensor.tolist() for key, (tensor, _) in tensors_of(step + seed).items()} | {"state": [{"seed": seed}]}


def prepare_saves(folder: Path) -> None:
    for step in (1, 2):
        save(folder, step)


def check_saved(folder: Path, step: int, seed: int) -> None:
    """Steps 1 and 2 stay, unless step 3 is complete and 1 pruned; the saved step is the old or the new one."""
    found = {checkpoint_step(path): read_content(path) for path in list_checkpoints(folder)}
    assert set(found) in ({1, 2}, {1, 2, 3}, {2, 3}) and (step == 3 or 3 not in found)
    for number, content in found.items():
        assert content == expected_content(number) or (number == step and content == expected_content(step, seed))
    assert latest_checkpoint(folder) == list_checkpoints(folder)[-1]


def save_scenario(num_ranks: int, background: bool, step: int = 3, seed: int = 0) -> Scenario:
    return Scenario(
        prepare_saves,
        lambda folder, rank: save(folder, step, rank, num_ranks, background, seed),
        lambda folder: check_saved(folder, step, seed),
        f"step_{step}.ckpt",
        num_ranks,
        restart=remove_unfinished,
    )


def prepare_resume(folder: Path) -> None:
    """Steps 1 and 2 are complete, 3 is damaged, and leftovers of a crash wait for removal."""
    checkpoints = folder / "checkpoints"
    prepare_saves(checkpoints)
    for name in ("step_3.ckpt", ".step_3.ckpt.other-1.unfinished", ".step_0.ckpt.deleting"):
        shutil.copytree(checkpoints / "step_2.ckpt", checkpoints / name)
    next((checkpoints / "step_3.ckpt").glob("*.safetensors")).write_bytes(b"torn")
    (checkpoints / ".other.shared").touch()
    (checkpoints / "tokenizer").mkdir()
    (checkpoints / "tokenizer" / "tokenizer.json").write_text(TOKENIZER)
    (folder / "metrics.csv").write_text(ROWS + "3,1.0\n")


def resume(folder: Path, rank: int) -> None:
    """What a run does with its files before the first step."""
    corpus = folder.parent / "corpus"
    corpus.mkdir(exist_ok=True)
    (corpus / "tokenizer.json").write_text(TOKENIZER)
    request = SimpleNamespace(**vars(RUN), run_dir=str(folder))
    assert agree_on_checkpoint(request, folder, Ranks()).path == folder / "checkpoints" / "step_2.ckpt"
    decided = {"start": SimpleNamespace(step=2), "describe": dict, "corpus": SimpleNamespace(folder=corpus)}
    run = SimpleNamespace(files={".hydra/config.yaml": "a: 1\n"}, **decided)
    prepare_folder(run, folder, MetricsFile(folder / "metrics.csv", ()))


def check_resumed(folder: Path) -> None:
    checkpoints = folder / "checkpoints"
    found = {path.name: path for path in list_checkpoints(checkpoints)}
    assert set(found) - {"step_3.ckpt"} == {"step_1.ckpt", "step_2.ckpt"}
    assert all(read_content(found[f"step_{step}.ckpt"]) == expected_content(step) for step in (1, 2))
    if "step_3.ckpt" in found:
        with pytest.raises(CheckpointError):
            Checkpoint.open(found["step_3.ckpt"])
    assert (checkpoints / "tokenizer" / "tokenizer.json").read_text() == TOKENIZER
    assert (folder / "metrics.csv").read_text().startswith(ROWS)


def prepare_source(folder: Path) -> None:
    save_random(folder / "source", GPT_CONFIG, tp_size=1)


def convert(function: Callable, source: str = "source", **options) -> Callable[[Path, int], None]:
    def act(folder: Path, rank: int) -> None:
        if not (folder / "target").exists():
            function(folder / source, folder / "target", **options)

    return act


def check_converted(read: Callable[[Path], object]) -> Callable[[Path], None]:
    """The source stays; a target with its name is complete."""

    def check(folder: Path) -> None:
        source = read_content(*list_checkpoints(folder / "source"))
        if (folder / "target").exists():
            assert read(folder / "target") == source

    return check


def prepare_published(folder: Path) -> None:
    prepare_source(folder)
    hf_conversion.export_hugging_face(folder / "source", folder / "published")


def read_imported(target: Path) -> dict[str, list]:
    """The weights are the source's, to the bit; moments and state are not in a published model."""
    source, found = (read_content(*list_checkpoints(folder)) for folder in (target.parent / "source", target))
    weights = {key: value for key, value in source.items() if key.startswith("model/")}
    assert found == weights | {"state": [{}]}
    return source


def read_exported(target: Path) -> dict[str, list]:
    """Import the export again; the moments and the state are not in it."""
    with hf_conversion.HuggingFaceReader(target) as reader:
        assert all(torch.isfinite(reader.read(name)).all() for name in reader.names())
    assert {path.name for path in target.iterdir()} >= {"config.json", "model.safetensors.index.json"}
    return read_content(*list_checkpoints(target.parent / "source"))


SCENARIOS = {
    "save, 1 rank": save_scenario(1, False),
    "save, 2 ranks, in the background": save_scenario(2, True),
    "replace a step, 1 rank": save_scenario(1, False, step=2, seed=7),
    "resume": Scenario(prepare_resume, resume, check_resumed, "checkpoints/step_2.ckpt"),
    "reshard": Scenario(
        prepare_source,
        convert(reshard_module.reshard, tp_size=2),
        check_converted(lambda target: read_content(*list_checkpoints(target))),
        "target",
    ),
    "export": Scenario(
        prepare_source,
        convert(hf_conversion.export_hugging_face, max_file_bytes=20_000),
        check_converted(read_exported),
        "target",
    ),
    "import": Scenario(
        prepare_published,
        convert(hf_conversion.import_hugging_face, "published", tp_size=2, vocab_multiple=GPT_CONFIG.vocab_multiple),
        check_converted(read_imported),
        "target",
    ),
}


def run_forked(scenario: Scenario, folder: Path, log: Path, crash: tuple[int, int] | None, ends_all: bool) -> None:
    """Act in forked processes; `crash` is the rank that exits and after how many operations.

    Once it has exited, the clock of the others runs faster, so that rank 0 gives up waiting for it then, not before.
    """
    context = multiprocessing.get_context("fork")
    speed = context.RawValue("i", 1)

    def enter(rank: int) -> None:
        write.time = SimpleNamespace(monotonic=lambda: time.monotonic() * speed.value, sleep=time.sleep)
        FileOperations(folder, log, rank, crash[1] if crash and crash[0] == rank else None).install()
        scenario.act(folder, rank)

    processes = [context.Process(target=enter, args=(rank,)) for rank in range(scenario.num_ranks)]
    for process in processes:
        process.start()
    if crash is not None:
        processes[crash[0]].join(60)
        assert processes[crash[0]].exitcode == CRASHED
        speed.value = 1000
        if ends_all:
            for process in processes:
                process.kill()
    for process in processes:
        process.join(60)
        assert crash is not None or process.exitcode == 0


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def act_here(scenario: Scenario, folder: Path) -> None:
    """The action once more, without a fault."""
    errors: list[BaseException] = []
    scenario.restart(folder)

    def enter(rank: int) -> None:
        try:
            scenario.act(folder, rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(scenario.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def enumerate_crashes(scenario: Scenario, folder: Path, every: int, offset: int = 0) -> tuple[list[int], int, int]:
    """Crash after every `every`-th operation of each rank, alone and with all ranks.

    Returns:
        file operations by rank, crashes, and states checked. With several ranks the number of states varies a little:
        the others may be anywhere when one crashes.
    """
    prepared, whole = folder / "prepared", folder / "whole"
    prepared.mkdir()
    scenario.prepare(prepared)
    shutil.copytree(prepared, whole)
    run_forked(scenario, whole, folder / "log", None, False)
    scenario.check(whole)
    lose_unsynced(whole, folder / "kept", folder / "log", len(unsynced(folder / "log")[1]))
    scenario.check(folder / "kept")
    assert (folder / "kept" / scenario.result).exists(), "the finished action was lost"
    counts = count_operations(folder / "log", scenario.num_ranks)
    assert min(counts) >= 3
    crashes = states = 0
    for rank, count in enumerate(counts):
        for number in range(1 + offset % every, count + 1, every):
            for ends_all in (False, True)[: scenario.num_ranks]:
                work = folder / "work"
                shutil.copytree(prepared, work / "crashed")
                run_forked(scenario, work / "crashed", work / "log", (rank, number), ends_all)
                for lost in range(-1, len(unsynced(work / "log")[1]) + 1):  # -1: only the process crashed
                    state = work / f"state_{lost}"
                    if lost < 0:
                        shutil.copytree(work / "crashed", state)
                    else:
                        lose_unsynced(work / "crashed", state, work / "log", lost)
                    where = f"rank {rank} of {scenario.num_ranks} after operation {number}, {lost} entries lost"
                    try:
                        scenario.check(state)
                        act_here(scenario, state)
                        scenario.check(state)
                        assert listing(state) == listing(whole)
                    except BaseException as error:
                        error.add_note(where)
                        raise
                    states += 1
                crashes += 1
                shutil.rmtree(work)
    return counts, crashes, states


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """No real fsync in this process, and no comparison of converted models, which only reads."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(hf_conversion, "compare_models", lambda *args, **options: None)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_a_sampled_operation_loses_nothing(tmp_path, name: str) -> None:
    enumerate_crashes(SCENARIOS[name], tmp_path, every=15, offset=len(name))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_any_operation_loses_nothing(tmp_path, name: str) -> None:
    counts, crashes, states = enumerate_crashes(SCENARIOS[name], tmp_path, every=1)
    assert crashes == sum(counts) * min(2, len(counts))
    print(f"{name}: {counts} operations, {crashes} crashes, {states} states")


def test_a_replaced_checkpoint_is_removed_only_where_its_successor_is_there(tmp_path) -> None:
    """A crash between the two renames of a repeated save leaves the replaced one alone."""
    for name in ("step_2.ckpt", "step_2.ckpt.replaced", "step_3.ckpt.replaced"):
        (tmp_path / name).mkdir()
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2.ckpt", "step_3.ckpt.replaced"]


def test_two_processes_cannot_create_the_same_folder(tmp_path) -> None:
    (tmp_path / ".target.unfinished" / "left").mkdir(parents=True)  # by a process that was killed
    (tmp_path / ".target.unfinished" / "shard").touch()
    with atomic_folder(tmp_path / "target") as working:
        (working / "file").touch()
        with pytest.raises(CheckpointError, match="another process is writing"), atomic_folder(tmp_path / "target"):
            pass
    assert listing(tmp_path) == {"target", "target/file"}
