"""The configuration of the planner: the typed form of `conf/plan.yaml`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from .checks import require_not_negative, require_path, require_positive
from .cluster import Cluster, read_cluster
from .from_dict import build
from .layout import ParallelConfig
from .model import ModelConfig
from .training import OptimizerConfig, PrecisionConfig, TrainerConfig, require_moments_fit

# Keys of a recipe or a fidelity that cost nothing, accepted so that a command line of train.py can be planned.
_TRAINING_ONLY = ("schedule", "checkpoint", "logger", "loss_reduction", "dropout_seeds", "fidelity")
_ENTRY_POINT_ONLY = ("run_dir", "overrides")


@dataclass(frozen=True)
class PlanData:
    """`data=`: the part that affects cost.

    Args:
        seq_length: tokens of a sequence.
    """

    seq_length: int

    def __post_init__(self) -> None:
        require_positive(self, "seq_length")


@dataclass(frozen=True)
class PlanConfig:
    """One request to the planner.

    Args:
        name: shown above the answer.
        model: its sizes.
        parallel: sizes or `auto`: the smallest power of two that fits, as in a run; the largest dp_size the devices and
            the batch allow.
        cluster: that it would run on.
        micro_batch_size: sequences per rank and forward pass.
        global_batch_size: sequences of one optimizer step.
        record: where `measure` writes its record, which `parallel=measured` reads.
        num_devices: devices of the job, all used unless `parallel.dp_size` is given; None: up to all of the cluster, in
            a search the largest number that some layout can use.
        best: rank all layouts instead of planning one, without and with `parallel.zero1` and, on GPUs,
            `parallel.batch_halves`.
        top: number of layouts that a ranking shows.
        find_recompute: if the model does not fit, use the first mode that recomputes more and fits.
        operations: also show every operation of a step with its counts and its time, slowest first; needs one layout.
        json: print JSON instead of a table.
        measure: train this many of the best modelled layouts for a few steps on this machine, which `cluster` must
            describe, with `micro_batch_size` as given; 0: none.
    """

    name: str
    model: ModelConfig
    parallel: ParallelConfig
    cluster: Cluster
    precision: PrecisionConfig
    data: PlanData
    trainer: TrainerConfig
    optimizer: OptimizerConfig
    micro_batch_size: int
    global_batch_size: int
    record: str
    num_devices: int | None = None
    best: bool = False
    top: int = 10
    find_recompute: bool = True
    operations: bool = False
    json: bool = False
    measure: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "micro_batch_size", "global_batch_size", "top")
        require_not_negative(self, "measure")
        require_path(self, "record")
        self.parallel.refuse_record()
        if self.measure and (self.best or self.operations):
            raise ValueError(f"`measure` must be 0 with `best` or `operations`, but is {self.measure}")
        if self.data.seq_length > self.model.max_position_embeddings:
            raise ValueError(
                f"`data.seq_length` must be at most `model.max_position_embeddings` "
                f"({self.model.max_position_embeddings}), but is {self.data.seq_length}"
            )
        if self.operations and self.best:
            raise ValueError("`operations` must be false with best=true, but is true")
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
        """Build from nested plain values; keys that concern only training are left out.

        Raises:
            ValueError: an unknown key, a missing key or a value of a different type, with its dotted name.
        """
        overrides = values.get("overrides") or []
        values = {key: value for key, value in values.items() if key not in (*_TRAINING_ONLY, *_ENTRY_POINT_ONLY)}
        if isinstance(values.get("cluster"), dict):
            path = values["cluster"].get("path")
            beside = [o for o in overrides if o.lstrip("+").startswith("cluster.") and "cluster.path" not in o]
            if path is not None and beside:
                raise ValueError(
                    f"`cluster.path` must be alone, its file is the whole cluster, but there is {beside[0]}"
                )
            given = {key: value for key, value in values["cluster"].items() if key != "path"}
            values["cluster"] = given if path is None else read_cluster(Path(path))
        if isinstance(values.get("data"), dict):
            values["data"] = {key: value for key, value in values["data"].items() if key == "seq_length"}
        return build(cls, values, "")

    @property
    def machine(self) -> Cluster:
        """The part of the cluster that the job may use."""
        if self.num_devices is None:
            return self.cluster
        return dataclasses.replace(self.cluster, num_devices=self.num_devices)
