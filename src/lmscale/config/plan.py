"""What the planner is asked: the typed form of `conf/plan.yaml`."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..planner.cluster import Cluster
from ..planner.job import Job, Layout, smallest_layout
from ..planner.plan import Plan, describe_shortage, make_plan
from ..planner.search import way_out
from .checks import require_positive
from .from_dict import build, keys_of
from .model import Recompute, TransformerConfig
from .pretrain import STAND_IN_VOCAB_SIZE, ParallelRequest
from .training import PrecisionConfig, require_matmul_precision, require_moments, require_moments_fit

# What a recipe or a fidelity says that costs nothing: a command line of train.py can be planned as it is.
_OF_TRAINING_ALONE = ("schedule", "checkpoint", "logger", "loss_reduction", "dropout_seeds", "fidelity")
_OF_THE_DOOR = ("run_dir", "overrides")
_HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class PlanData:
    """`data=`: as much of it as costs something."""

    seq_length: int

    def __post_init__(self) -> None:
        require_positive(self, "seq_length")


@dataclass(frozen=True)
class PlanTrainer:
    """`trainer=`: as much of it as costs something."""

    max_steps: int
    matmul_precision: str = "medium"

    def __post_init__(self) -> None:
        require_positive(self, "max_steps")
        require_matmul_precision(self.matmul_precision)


@dataclass(frozen=True)
class PlanOptimizer:
    """`optimizer=`: as much of it as costs something."""

    moments: str = "fp32"

    def __post_init__(self) -> None:
        require_moments(self.moments)


@dataclass(frozen=True)
class PlanConfig:
    """One question to the planner.

    Args:
        model: the fields of `TransformerConfig`, and `name`.
        parallel: sizes or `auto`: the smallest power of two that fits, as in a run; the largest dp_size the devices and
            the batch allow.
        cluster: where it would run.
        num_devices: the job may use; None: all of the cluster. A search uses exactly as many, with None as many as any
            layout can.
        best: rank all layouts instead of planning one.
        top: layouts a ranking shows.
        find_recompute: where the model does not fit as it is, take the first mode that recomputes more and does fit.
        json: print JSON instead of a table.
    """

    name: str
    model: dict
    parallel: ParallelRequest
    cluster: Cluster
    precision: PrecisionConfig
    data: PlanData
    trainer: PlanTrainer
    micro_batch_size: int
    global_batch_size: int
    optimizer: PlanOptimizer = PlanOptimizer()
    num_devices: int | None = None
    best: bool = False
    top: int = 10
    find_recompute: bool = True
    json: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "micro_batch_size", "global_batch_size", "top")
        require_moments_fit(self.optimizer.moments, self.precision.dtype)
        peaks = self.cluster.peaks
        if peaks.tf32 is not None and self.trainer.matmul_precision != "highest":  # as the run multiplies
            peaks = dataclasses.replace(peaks, fp32=peaks.tf32)
            object.__setattr__(self, "cluster", dataclasses.replace(self.cluster, peaks=peaks))
        if self.num_devices is not None:
            require_positive(self, "num_devices")
            if self.num_devices > self.cluster.num_devices:
                raise ValueError(
                    f"`num_devices` must be at most the {self.cluster.num_devices:,} of {self.cluster.name}, "
                    f"but is {self.num_devices:,}"
                )

    @classmethod
    def from_dict(cls, values: dict) -> "PlanConfig":
        """Build from nested plain values; what a recipe says of training alone is left out.

        Raises:
            ValueError: an unknown key, a missing key or a value of another type, with its dotted name.
        """
        overrides = values.get("overrides") or []
        values = {key: value for key, value in values.items() if key not in (*_OF_TRAINING_ALONE, *_OF_THE_DOOR)}
        if isinstance(values.get("cluster"), dict):
            path = values["cluster"].get("path")
            beside = [o for o in overrides if o.lstrip("+").startswith("cluster.") and "cluster.path" not in o]
            if path is not None and beside:
                raise ValueError(
                    f"`cluster.path` must be alone, its file is the whole cluster, but there is {beside[0]}"
                )
            values["cluster"] = values["cluster"] if path is None else _read_cluster(Path(path))
            values["cluster"] = {key: value for key, value in values["cluster"].items() if key != "path"}
        for group, cls_of_group in (("data", PlanData), ("trainer", PlanTrainer), ("optimizer", PlanOptimizer)):
            kept = {spec.name for spec in dataclasses.fields(cls_of_group)}
            if isinstance(values.get(group), dict):
                values[group] = {key: value for key, value in values[group].items() if key in kept}
        return build(cls, values, "")

    @property
    def machine(self) -> Cluster:
        """As much of the cluster as the job may use."""
        if self.num_devices is None:
            return self.cluster
        return dataclasses.replace(self.cluster, num_devices=self.num_devices)

    def job(self) -> tuple[Job, list[str]]:
        """What is to be trained, and notes on what was filled in.

        Raises:
            ValueError: a model that cannot be, a sequence longer than its positions, a type the devices do not have.
        """
        notes, sizes = [], {key: value for key, value in self.model.items() if key != "name"}
        if sizes.get("vocab_size") is None:
            sizes["vocab_size"] = STAND_IN_VOCAB_SIZE
            notes.append(f"model.vocab_size is the tokenizer's: planned with {STAND_IN_VOCAB_SIZE:,} ids")
        config = build(TransformerConfig, sizes, "model.")
        if self.data.seq_length > config.max_position_embeddings:
            raise ValueError(
                f"`data.seq_length` must be at most `model.max_position_embeddings` "
                f"({config.max_position_embeddings}), but is {self.data.seq_length}"
            )
        dtype = self.precision.dtype
        if dtype in _HALF and dtype not in self.cluster.dtypes:
            other = next((half for half in _HALF if half in self.cluster.dtypes), dtype)  # as many bytes
            if other != dtype:
                notes.append(f"a {self.cluster.device} has no {dtype}: planned with precision={other}")
            dtype = other
        if self.cluster.is_gpu and not self.cluster.calibration.fused_attention and config.attention == "sdpa":
            notes.append(
                f"step times on {self.cluster.name} are of software whose attention passes its scores through memory, "
                "bytes and FLOPs of model.attention=sdpa"
            )
        self.cluster.peak_flops_per_s(dtype)
        half_moments, steps = self.optimizer.moments == "bf16", self.trainer.max_steps
        return Job(config, self.global_batch_size, self.data.seq_length, dtype, steps, half_moments), notes

    def plan(self) -> tuple[Plan, list[str]]:
        """The one plan asked for, with notes.

        Raises:
            ValueError: a layout that cannot be or does not fit, with the nearest one that works.
        """
        job, notes = self.job()
        layout = self._layout(job)
        try:
            with keys_of(TransformerConfig, "model."), keys_of(ParallelRequest, "parallel."):
                plan = make_plan(job, layout, self.machine)
        except ValueError as error:
            raise ValueError(f"{error}; {way_out(job, layout, self.machine)}") from None
        if plan.missing_bytes > 0 and self.find_recompute:
            modes = list(Recompute)
            for mode in modes[modes.index(layout.recompute) + 1 :]:
                other = make_plan(job, dataclasses.replace(layout, recompute=mode), self.machine)
                if other.missing_bytes <= 0:
                    notes.append(
                        f"with model.recompute={layout.recompute.value} {describe_shortage(plan)}: "
                        f"planned with model.recompute={mode.value}"
                    )
                    return other, notes
        if plan.missing_bytes > 0:
            raise ValueError(
                f"the memory a rank needs must be at most what its device has, but with {layout.overrides} "
                f"{describe_shortage(plan)}; {way_out(job, layout, self.machine)}"
            )
        return plan, notes

    def _layout(self, job: Job) -> Layout:
        """The layout asked for, with `auto` filled in."""
        tp_size, dp_size, asked = self.parallel.tp_size, self.parallel.dp_size, job.config.recompute

        def filled(tp: int, mode: Recompute = asked) -> Layout:
            dp = self._dp_size(tp) if dp_size == "auto" else dp_size
            return Layout(tp, dp, self.micro_batch_size, mode, self.parallel.sequence_parallel, self.parallel.zero1)

        def possible(tp: int, mode: Recompute) -> Layout | None:
            layout = filled(tp, mode)
            divides = self.global_batch_size % (self.micro_batch_size * layout.dp_size) == 0
            divides = divides and not (layout.grid.cuts_sequence and job.seq_length % tp)
            return layout if divides and layout.grid.world_size <= self.machine.num_devices else None

        if tp_size != "auto":
            return filled(tp_size)
        largest, usable, modes = self.machine.num_devices, self.machine.usable_bytes, list(Recompute)
        for mode in modes[modes.index(asked) :] if self.find_recompute else [asked]:
            found = smallest_layout(job, partial(possible, mode=mode), usable, self.cluster.is_gpu, largest)
            if found is not None:
                return filled(found.tp_size)
        raise ValueError(
            "`parallel.tp_size`=auto found none: no power of two divides the model and fits; "
            f"{way_out(job, filled(1), self.machine)}"
        )

    def _dp_size(self, tp_size: int) -> int:
        """The largest number of data ranks with a device and whole micro-batches each; 1 where there is none."""
        whole = self.global_batch_size // self.micro_batch_size
        largest = min(whole, self.machine.num_devices // tp_size)
        return next((dp for dp in range(largest, 1, -1) if whole % dp == 0), 1)


def load_cluster(path: Path) -> Cluster:
    """The cluster of a file, of conf/cluster or of one's own.

    Raises:
        ValueError: no such file, not YAML with keys, or a key or value that cannot be.
    """
    values = _read_cluster(path)
    return build(Cluster, {key: value for key, value in values.items() if key != "path"}, "cluster.")


def _read_cluster(path: Path) -> dict:
    import yaml  # for a file of one's own alone: Hydra has read the others

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"`cluster.path` must be a file that can be read, but is {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = f" line {error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        raise ValueError(f"`cluster.path` must be a YAML file, but {path}{where} is not") from None
    if not isinstance(values, dict):
        raise ValueError(f"`cluster.path` must be a YAML file of keys as in conf/cluster, but is {path}")
    return values
