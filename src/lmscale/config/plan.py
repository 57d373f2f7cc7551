"""The configuration of the planner: the typed form of `conf/plan.yaml`."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from .checks import Checked, Count, PathText, Positive, check, expand_home, require
from .cluster import Cluster, read_cluster
from .from_dict import EntryConfig
from .model import ModelConfig, require_positions
from .training import TrainerConfig, TrainingRequest
from .validation import describe_excess

# Keys of a recipe or a fidelity that cost nothing, accepted so that a command line of train.py can be planned.
_TRAINING_ONLY = ("schedule", "checkpoint", "logger", "loss_reduction", "dropout_seeds", "fidelity")


@dataclass(frozen=True)
class PlanData(Checked):
    """`data=`: the part that affects cost.

    Args:
        seq_length: tokens of a sequence.
    """

    seq_length: Positive


@dataclass(frozen=True)
class PlanTeacher(Checked):
    """`teacher=`: what the model is distilled from.

    Args:
        model: sizes of the teacher, chosen as `model@teacher.model=bert_3.9b`; of the student's family and vocabulary.
        top_k: log-probabilities per scored token of a cache in place of the model.
    """

    model: ModelConfig | None = None
    top_k: Positive | None = None


@dataclass(frozen=True)
class PlanConfig(TrainingRequest, EntryConfig):
    """One request to the planner.

    Args:
        name: shown above the answer.
        model: its sizes.
        cluster: that it would run on.
        record: where `measure` writes its record.
        num_devices: devices of the job; None: as many as the cluster and the batch allow.
        best: rank all layouts, with and without `parallel.sequence_parallel`, `zero1` and `batch_halves`, instead of
            planning one; those that are typed hold for all.
        top: number of layouts that a ranking shows.
        find_recompute: if the model does not fit, plan with the first `recompute` that does; false where
            `model.recompute` is typed.
        teacher: of a distillation, the model or its cache.
        operations: show every operation of a step with its counts and time; needs one layout.
        json: print JSON instead of a table.
        measure: train this many of the best modelled layouts for a few steps on this machine; 0: none.
    """

    model: ModelConfig
    cluster: Cluster
    data: PlanData
    trainer: TrainerConfig
    record: PathText
    num_devices: Positive | None = None
    best: bool = False
    top: Positive = 10
    find_recompute: bool = True
    operations: bool = False
    json: bool = False
    measure: Count = 0
    teacher: PlanTeacher = PlanTeacher()
    typed = frozenset()  # no field: the keys of the command line

    def check_rules(self) -> None:
        super().check_rules()
        teacher, top_k = self.teacher.model, self.teacher.top_k or 0
        is_alone = teacher is None and not top_k
        is_modelled = not self.measure or (is_alone and not (self.best or self.operations))
        require(self, "measure", "0 with `best`, `operations` or a teacher", is_modelled)
        require(self, "parallel.pp_size", "1 with a teacher", is_alone or self.parallel.num_stages in (1, "auto"))
        most = 0 if teacher is not None else self.model.vocab_size or top_k
        rule = f"null with `teacher.model`, else at most `model.vocab_size` ({self.model.vocab_size or 'null'})"
        require(self, "teacher.top_k", rule, top_k <= most)
        s, positions = self.data.seq_length, math.inf if teacher is None else teacher.max_position_embeddings
        require(self, "data.seq_length", f"at most the {positions} positions of the teacher", s <= positions)
        for name in ("family", "vocab_size") if teacher is not None else ():
            own = getattr(self.model, name)
            require(self, f"teacher.model.{name}", f"that of `model` ({own or 'null'})", getattr(teacher, name) == own)
        require(self, "parallel.pp_size", "1 with `measure`", self.parallel.num_stages == 1 or not self.measure)
        for name, free in (("tp_size", (1, "auto")), ("dp_size", ("auto",))):
            rule = f"{free[-1]} with `measure`, which tries every size"
            require(self, f"parallel.{name}", rule, getattr(self.parallel, name) in free or not self.measure)
        require_positions(self)
        require(self, "operations", "false with best=true", not (self.operations and self.best))
        peaks = self.cluster.peaks
        if peaks.tf32 is not None and self.trainer.matmul_precision != "highest":  # as the run multiplies
            peaks = dataclasses.replace(peaks, fp32=peaks.tf32)
            object.__setattr__(self, "cluster", dataclasses.replace(self.cluster, peaks=peaks))
        if self.num_devices is not None:
            rule = f"at most the {self.cluster.num_devices:,} of {self.cluster.name}"
            require(self, "num_devices", rule, self.num_devices <= self.cluster.num_devices)
        num_samples = self.trainer.num_validation_samples
        if self.cluster.is_gpu and isinstance(num_samples, int):
            costly = describe_excess(self.trainer, num_samples, self.global_batch_size)
            if costly:
                raise ValueError(costly)

    @classmethod
    def from_dict(cls, values: dict) -> "PlanConfig":
        """Build from nested plain values; keys that concern only training are left out.

        Raises:
            ValueError: an unknown key, a missing key or a value of a different type, with its dotted name.
        """
        overrides = values.get("overrides") or []
        values = {key: value for key, value in values.items() if key not in _TRAINING_ONLY}
        if isinstance(values.get("cluster"), dict):
            path = values["cluster"].get("path")
            check(PathText | None, path, "cluster.path")
            beside = [o for o in overrides if o.lstrip("+").startswith("cluster.") and "cluster.path" not in o]
            if path is not None and beside:
                raise ValueError(
                    f"`cluster.path` must be alone, its file is the whole cluster, but there is {beside[0]}"
                )
            given = {key: value for key, value in values["cluster"].items() if key != "path"}
            values["cluster"] = given if path is None else read_cluster(Path(expand_home(path, "cluster.path")))
        if isinstance(values.get("data"), dict):
            values["data"] = {key: value for key, value in values["data"].items() if key == "seq_length"}
        typed = {override.lstrip("+").partition("=")[0] for override in overrides}
        question = super().from_dict(values)
        if "model.recompute" in typed and question.model.recompute != "auto" and "find_recompute" not in typed:
            question = dataclasses.replace(question, find_recompute=False)
        if typed & {"precision", "precision.dtype"}:  # a recipe's half type stands for the device's own
            question.cluster.peak_flops_per_s(question.precision.dtype)
        object.__setattr__(question, "typed", frozenset(typed))
        return question

    @property
    def fixed_layout(self) -> dict[str, int | bool]:
        """The sizes and options of the layout that were typed, which a search keeps; by field of `Layout`."""
        names = ("tp_size", "dp_size", "sequence_parallel", "zero1", "batch_halves")
        given = {name: getattr(self.parallel, name) for name in names if f"parallel.{name}" in self.typed}
        return {name: value for name, value in given.items() if value != "auto"}

    @property
    def machine(self) -> Cluster:
        """The part of the cluster that the job may use."""
        if self.num_devices is None:
            return self.cluster
        return dataclasses.replace(self.cluster, num_devices=self.num_devices)
