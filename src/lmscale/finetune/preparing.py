"""From the configuration of a finetuning to what its ranks run: every check, and each file of data encoded, once.

torch takes seconds to import, so the checks that do not need it come first.
"""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tokenizers

from ..config import Layout
from ..config.finetune import FinetuneConfig, TaskConfig
from ..data.prepare import cache_folder, note_unknown
from ..data.tokenizer import Tokenizer
from ..results import RECORD, check_no_record
from ..runtime import accelerator
from ..runtime.run_lock import check_not_in_use, run_folder_errors
from ..runtime.world import is_first_rank, world_from_outside
from ..shared_files import build_folder
from ..training import capacity
from .features import Features, load_features, save_features
from .initial_checkpoint import InitialCheckpoint, check_initial_checkpoint
from .scoring import metric_names
from .sources import fingerprint, is_on_hub
from .tasks import benchmark_of, read_examples

FEATURES_VERSION = 8  # incremented when the same rows give other features or notes
_SETTINGS = ("name", "max_seq_length", "max_qa_length", "doc_stride", "max_query_length")
_SETTINGS += ("columns", "labels", "value_range", "skip_broken")


@dataclass(frozen=True, kw_only=True)
class FinetuneJob:
    """A finetuning that has passed every check; its data stay in the cache until a rank loads them.

    Args:
        run: the configuration as requested.
        files: texts by path, written into the run folder when training starts.
        start: the checkpoint.
        train: folder of the encoded training set; None if nothing is trained.
        sets: folders of the encoded sets to score, by name.
        state_bytes: memory of a rank's weights, gradients and optimizer.
    """

    run: FinetuneConfig
    layout: Layout
    accelerator: Literal["cpu", "gpu"]
    files: dict[str, str]
    start: InitialCheckpoint
    train: Path | None
    sets: dict[str, Path]
    state_bytes: int

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.accelerator == "gpu"

    def training_features(self) -> Features | None:
        """The training set; None if nothing is trained."""
        if self.train is None:
            return None
        return _load(self.train, self.run.task.train).first(self.run.trainer.max_train_examples)

    def scored_features(self) -> dict[str, Features]:
        """The sets to score, by name."""
        return {name: _load(self.sets[name], place) for name, place in self.run.task.scored_sets().items()}


def _load(folder: Path, place: str) -> Features:
    """Load a set, whose notes get the place of this run: the cache may have encoded the same rows from another."""
    features = load_features(folder)
    return replace(features, notes=[f"{place}: {note}" for note in features.notes])


def check_values(values: dict[str, Any]) -> None:
    """Check a configuration in plain values, for the jobs of a sweep: its values, its paths and its run folder.

    Raises:
        ValueError: anything invalid, in one line.
    """
    run = FinetuneConfig.from_dict(values)
    if not is_finished(run):
        check_paths(run)


def is_finished(run: FinetuneConfig) -> bool:
    """Whether the run folder has the record of this very configuration, and the checkpoint that it was to save.

    The content of its data files and of its checkpoint is not compared. A job whose ranks others have started does not
    count as finished, because they might not all see the folder.
    """
    if world_from_outside() is not None:
        return False
    folder, saves = Path(run.run_dir), run.trainer.save and run.trainer.num_epochs > 0
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        is_same = record["config"]["digest"] == run.digest()
    except (OSError, ValueError, LookupError, TypeError):  # none, damaged, or of an earlier version
        return False
    return is_same and (not saves or any(folder.glob("checkpoints/step_*.ckpt")))


def check_paths(run: FinetuneConfig) -> None:
    """Check that the run folder is unused, and that the checkpoint and the data exist.

    Raises:
        ValueError: the folder cannot be read, is in use, or has a record or a checkpoint (`ckpt=RUN` takes the latest
            one, which could be an earlier run's); or a path does not exist, whose key the message names.
    """
    folder = Path(run.run_dir)
    with run_folder_errors(folder):
        check_no_record(folder)
        left = sorted(folder.glob("checkpoints/step_*.ckpt"))
        if is_first_rank():
            check_not_in_use(folder)
    if left:
        raise ValueError(
            f"`hydra.run.dir` must be a folder without the checkpoints of another run, but {run.run_dir} has "
            f"{left[-1].name}"
        )
    for key, place in _places(run.task).items():
        is_read = key != "task.train" or run.trainer.num_epochs
        if is_read and not is_on_hub(place) and not os.path.exists(place):
            raise ValueError(f"`{key}` must be a file or folder, or hub:<split>, but {place} does not exist")
    if not os.path.exists(run.ckpt):
        raise ValueError(f"`ckpt` must be a checkpoint or a run folder, but {run.ckpt} does not exist")


def _places(task: TaskConfig) -> dict[str, str]:
    """The place of each set by its key."""
    places = {} if task.train is None else {"task.train": task.train}
    for name, place in task.scored_sets().items():
        places[f"task.{'validation' if name in task.validation else 'test'}.{name}"] = place
    return places


def prepare_job(run: FinetuneConfig, files: dict[str, str] | None = None) -> FinetuneJob:
    """Check a finetuning, cheap checks first: paths, machine, checkpoint, layout; then read and encode the data.

    Args:
        files: texts by path, written into the run folder when training starts.

    Raises:
        ValueError: anything invalid, in one line.
    """
    check_paths(run)
    device, task, parallel = accelerator.resolve_accelerator(run.trainer.accelerator), run.task, run.parallel
    on_gpu, world = device == "gpu", world_from_outside()
    if on_gpu:
        accelerator.set_allocator()
        accelerator.check_products(run.precision.dtype)
    start, tokenizer = check_initial_checkpoint(run)
    workload = capacity.finetuning_workload(run, start.config, on_gpu)
    if on_gpu and world is None and parallel.dp_size == "auto":  # data ranks may have unequal shares of a step
        import torch

        parallel = replace(parallel, dp_size=max(1, torch.cuda.device_count() // parallel.tp_size))
    layout, needed = capacity.choose_layout(parallel, workload, world)
    start.config.check_tensor_parallel(layout.tp_size, layout.pad_heads)
    if layout.zero1 and run.trainer.save:
        capacity.check_copies("parallel.zero1", workload, layout, needed, world)
    cache = cache_folder(run.cache_dir, "cache_dir") / "finetune"
    job = FinetuneJob(
        run=run,
        layout=layout,
        accelerator=device,
        files=files or {},
        start=start,
        train=prepare_features(task, task.train, tokenizer, cache) if run.trainer.num_epochs else None,
        sets={name: prepare_features(task, place, tokenizer, cache) for name, place in task.scored_sets().items()},
        state_bytes=capacity.state_bytes(workload, layout),
    )
    _check_labels(job)
    return job


def _check_labels(job: FinetuneJob) -> None:
    """Refuse sets without labels to train or choose on, and an objective that the sets do not have."""
    run, task, sets = job.run, job.run.task, job.scored_features()
    must_have = {f"task.validation.{name}": sets[name] for name in task.chosen_on()}
    must_have |= {"task.train": job.training_features()} if job.train is not None else {}
    for key, features in must_have.items():
        if not features.is_labelled:
            columns = {layout.get("label") for layout in task.layouts if layout.get("label") is not None}
            where = f", in the column {' or '.join(sorted(map(str, columns)))}" if columns else ""
            raise ValueError(f"`{key}` must have a label for every example{where}, but {_places(task)[key]} has none")
    if task.name == "squad_v2" and not task.chosen_on() and task.null_threshold is None:
        raise ValueError("`task.null_threshold` must be given where `task.validation` has no set, but is null")
    if run.objective is not None:
        names = metric_names(task, sets, task.chosen_on())
        if run.objective not in names:
            raise ValueError(f"`objective` must be one of {', '.join(names)}, but is {run.objective!r}")


def prepare_features(task: TaskConfig, place: str, tokenizer: Tokenizer, cache_dir: Path) -> Path:
    """Read and encode the rows at `place`, unless they are cached.

    Returns:
        folder for `load_features`.

    Raises:
        ValueError: the rows cannot be used; see `read_examples`. What the cache has is damaged.
    """
    settings = [getattr(task, name) for name in _SETTINGS]
    facts = (FEATURES_VERSION, tokenizers.__version__, tokenizer.fingerprint, settings, fingerprint(task, place))
    folder = cache_dir / f"{task.name}_{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"
    if folder.is_dir():
        try:
            load_features(folder)
        except (FileNotFoundError, EOFError, ValueError, TypeError):  # of torn files
            raise ValueError(f"{folder} is damaged; remove it to have it built again") from None
        return folder
    try:
        examples, report = read_examples(task, place)
    except ValueError as error:
        key = next((key for key, its_place in _places(task).items() if its_place == place), "task")
        raise ValueError(f"`{key}`: {error}") from None
    features = benchmark_of(task).encode(task, examples, tokenizer)
    num_unknown = tokenizer.count_unknown(features.tokens)
    features = replace(features, notes=report.notes() + note_unknown(num_unknown, len(features.tokens), None))
    try:
        with build_folder(folder) as building:
            save_features(features, building)
    except OSError as error:
        raise ValueError(f"`cache_dir` must be a writable folder with free space, but {cache_dir}: {error}") from None
    return folder
