"""The configuration of a finetuning: the typed form of `conf/finetune.yaml` and its tasks."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from .checks import Checked, Count, Fraction, PathText, Positive, Rule, Seed, check, is_line, refuse, require
from .from_dict import EntryConfig
from .training import Formula, ScheduleConfig, TrainerOptions, TrainingRequest

TASKS = ("squad_v1", "squad_v2", "race")  # with a format of their own; every other one is a table
TABLE_COLUMNS = ("id", "first", "second", "label")
FROM_HUB = "hub:"  # before the name of a split, or SUBSET/SPLIT; everything else is a path
METRICS = ("accuracy", "f1", "matthews", "pearson", "spearman")
OF_NUMBERS = ("pearson", "spearman")
# GLUE's name of each of its tasks, which its folder and its submission file have.
GLUE = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP", "mnli": "MNLI", "qnli": "QNLI"}
GLUE |= {"rte": "RTE", "wnli": "WNLI"}


@dataclass(frozen=True)
class TaskConfig(Checked):
    """`task=`: a table of texts with a class or a number, SQuAD or RACE, where its rows are and how they become inputs.

    Args:
        name: one of `TASKS`, or with `columns` any other, of small letters, digits and underscores.
        train: file or folder in the official layout, or `hub:<split>`; None if nothing is trained.
        validation: sets by name, each a place as in `train`; they choose thresholds and checkpoints.
        test: further sets to score by name, which need no labels and choose nothing.
        hub_name: data set on the Hugging Face hub, for places that begin with `hub:`; None: no place does.
        hub_subset: its configuration.
        max_seq_length: tokens of an input with [CLS] and [SEP]; longer ones lose the tail of their second text (SQuAD:
            continue in further windows).
        max_qa_length: RACE: tokens of question and option together; the rest is cut off.
        doc_stride: SQuAD: tokens from the start of a window to the start of the next.
        max_query_length: SQuAD: tokens of a question.
        max_answer_length: SQuAD: longest answer in tokens.
        num_best: SQuAD: candidates kept per question.
        null_threshold: SQuAD 2.0: how much "no answer" must exceed the best answer; None: the best threshold on the
            first validation set.
        columns: of a table: `id` (null: the row's number), `first` and `second` text (null: none) and `label` (where it
            is missing, labels are unknown); names, or numbers from 0 in a file without a header. A list of several such
            layouts: the first that a table has. `classes` of a layout: those of its labels by number, if they are not
            `labels` in their order.
        labels: names of the classes, or their indices as labels.
        value_range: lowest and highest label of a task whose labels are numbers, instead of `labels`.
        metrics: of `METRICS`; a search and the median over seeds compare the first. For numbers `pearson` and
            `spearman`, for classes the others.
        path: of a GLUE task: GLUE's folder, whose files replace the splits `hub:...`, or a folder per task; None: the
            hub.
        submit: also predict GLUE's test sets.
        skip_broken: skip and count labelled rows with an empty text or another number of columns.
        by_size: batch size, learning rate and epochs by size of the model (Table 6), of which `size` chooses.

    Raises:
        ValueError: an unknown name, lengths that leave no space for the text, a stride that would leave tokens out.
    """

    name: str
    train: PathText | None
    validation: dict[str, PathText | None]
    test: dict[str, PathText | None] = field(default_factory=dict)
    hub_name: str | None = None
    max_seq_length: Annotated[int, Rule("at least 8", lambda number: number >= 8)] = 512
    hub_subset: str | None = None
    max_qa_length: Positive | None = None
    doc_stride: Positive | None = None
    max_query_length: Positive | None = None
    max_answer_length: Positive | None = None
    num_best: Positive | None = None
    null_threshold: float | None = None
    columns: dict | list | None = None
    labels: list | None = None
    value_range: list | None = None
    metrics: list | None = None
    path: PathText | dict[str, PathText] | None = None
    submit: bool = False
    skip_broken: bool = False
    by_size: dict = field(default_factory=dict)

    def check_rules(self) -> None:
        if self.name in TASKS:
            for name in ("columns", "labels", "value_range", "metrics"):
                require(self, name, f"null for {self.name}, whose files are known", getattr(self, name) is None)
        elif self.columns is None:
            refuse("name", f"one of {', '.join(TASKS)}, or come with `columns`", self.name)
        else:
            self._check_table()
        for name in ("path", "submit"):
            rule = f"left out for {self.name}, which is not a GLUE task"
            require(self, name, rule, self.name in GLUE or not getattr(self, name))
        others = [name for name in self.path if name not in GLUE] if isinstance(self.path, dict) else []
        require(self, "path", f"a folder, or folders by {', '.join(GLUE)}", not others)
        of_squad = ("doc_stride", "max_query_length", "max_answer_length", "num_best")
        for name in {"race": ("max_qa_length",), "squad_v1": of_squad, "squad_v2": of_squad}.get(self.name, ()):
            check(Positive, getattr(self, name), name)
        if self.name in ("squad_v1", "squad_v2"):
            shortest = self.max_query_length + self.doc_stride + 3
            rule = f"at least `max_query_length` + `doc_stride` + 3 ({shortest}), or windows would leave tokens out"
            require(self, "max_seq_length", rule, self.max_seq_length >= shortest)
        for sets in (self.validation, self.test):  # their names are names of folders
            wrong = [place for place in sets.values() if place is not None and not (isinstance(place, str) and place)]
            wrong += [name for name in sets if not is_line(name) or "/" in name or not name.strip(".")]
            if wrong:
                raise ValueError(f"`validation` and `test` must be paths by name, but hold {wrong[0]!r}")
        on_hub = [p for p in (self.train, *self.scored_sets().values()) if p is not None and p.startswith("hub:")]
        if on_hub and self.hub_name is None:
            raise ValueError(f"`hub_name` must be given for {on_hub[0]}, but is null")
        twice = sorted(set(self.validation) & set(self.test))
        if twice:
            raise ValueError(f"`test` must have other names than `validation`, but both have {twice[0]!r}")

    def _check_table(self) -> None:
        if not re.fullmatch("[a-z0-9_]+", self.name):
            raise ValueError(f"`name` must be of small letters, digits and underscores, but is {self.name!r}")
        for layout in self.layouts or [{}]:
            _check_layout(layout)
        if (self.labels is None) == (self.value_range is None):
            raise ValueError(
                f"a table must have `labels` or `value_range`, but has {'both' if self.labels else 'neither'}"
            )
        if self.labels is not None and len(set(filter(is_line, self.labels))) < max(2, len(self.labels)):
            rule = "at least two texts, each once on one line without tabs"
            raise ValueError(f"`labels` must be {rule}, but are {self.labels}")
        for layout in self.layouts:
            _check_classes(layout.get("classes"), self.labels or [])
        if self.value_range is not None:
            numbers = [value for value in self.value_range if type(value) in (int, float) and math.isfinite(value)]
            is_range = len(numbers) == len(self.value_range) == 2 and numbers[0] < numbers[1]
            require(self, "value_range", "two numbers, the lowest and the highest label", is_range)
        known = [name for name in METRICS if (name in OF_NUMBERS) == (self.labels is None)]
        known = [name for name in known if name != "f1" or len(self.labels) == 2]
        found = metrics_of(vars(self))
        rule = f"of {', '.join(known)}, each once"
        require(self, "metrics", rule, len(found) == sum(name in found for name in known))

    @property
    def layouts(self) -> list[dict[str, str | int | None]]:
        """Every layout of a table's columns; none for other formats."""
        return self.columns if isinstance(self.columns, list) else [self.columns] if self.columns is not None else []

    def scored_sets(self) -> dict[str, str]:
        """Place of every set to score by name, validation first."""
        return {name: place for name, place in (self.validation | self.test).items() if place is not None}

    def located(self) -> "TaskConfig":
        """The task with the test sets of a submission, and files of GLUE in place of splits of the hub."""
        test = dict(self.test)
        if self.submit:  # in the words of the hub
            names = ["test_matched", "test_mismatched"] if self.name == "mnli" else ["test"]
            test = {name: f"hub:{name}" for name in names} | test
            test |= {"ax": "hub:ax/test"} if self.name == "mnli" else {}
        by_task = isinstance(self.path, dict)
        path = self.path.get(self.name) if by_task else self.path and f"{self.path}/{GLUE[self.name]}"
        if path is None:
            return replace(self, test=test)

        def file_of(place: str | None) -> str | None:
            if place is None or not place.startswith(FROM_HUB):
                return place
            split = place.removeprefix(FROM_HUB).replace("validation", "dev")
            file = f"{path}/{'diagnostic' if split == 'ax/test' else split}.tsv"
            return f"{file}.gz" if Path(f"{file}.gz").exists() and not Path(file).exists() else file

        sets = [{name: file_of(place) for name, place in each.items()} for each in (self.validation, test)]
        return replace(self, train=file_of(self.train), validation=sets[0], test=sets[1])

    def chosen_on(self) -> list[str]:
        """Names of the sets that may choose thresholds and checkpoints."""
        return [name for name, place in self.validation.items() if place is not None]


def _check_layout(layout: Any) -> None:
    if not isinstance(layout, dict) or not {"first"} <= set(layout) <= {*TABLE_COLUMNS, "classes"}:
        found = ", ".join(map(str, layout)) or "none"
        raise ValueError(f"`columns` must be given for {', '.join(TABLE_COLUMNS)}, but are for {found}")
    named = [layout[key] for key in TABLE_COLUMNS if layout.get(key) is not None]
    are_columns = all(isinstance(name, str) for name in named) or all(type(name) is int and name >= 0 for name in named)
    if not are_columns or len(set(named)) < len(named) or layout["first"] is None:
        rule = "all names or all numbers, each once, with a `first` text"
        raise ValueError(f"`columns` must be {rule}, but are {layout}")


def _check_classes(classes: Any, labels: list[str]) -> None:
    names = classes if isinstance(classes, list) and all(isinstance(name, str) for name in classes) else []
    are_as_many = len(set(names)) == len(names) == len(labels)
    if classes is not None and not (are_as_many and len(set(names) & set(labels)) in (0, len(labels))):
        rule = "as many names as `labels`, each once, and all of them labels or none"
        raise ValueError(f"`classes` of `columns` must be {rule}, but are {classes!r}")


def metrics_of(task: Mapping[str, Any]) -> list[str]:
    """The metrics of a table, of its plain values."""
    return task.get("metrics") or ["accuracy" if task.get("value_range") is None else "pearson"]


def objective_of(task: Mapping[str, Any]) -> str:
    """The metric that a search and the median over seeds compare, of a task's plain values."""
    metrics = ["f1"] if task["name"].startswith("squad") else metrics_of(task)
    return f"{task['name']}/{metrics[0]}"


@dataclass(frozen=True)
class TokenizerPath(Checked):
    """`tokenizer=`: the checkpoint's own unless `path` is set.

    Args:
        path: tokenizer.json, vocab.txt, or a folder with one; None: the checkpoint's own. See `tokenizer.path` of
            src/train.py.
    """

    path: PathText | None = None


@dataclass(frozen=True)
class FinetuneTrainer(TrainerOptions):
    """`trainer=`: length and hardware of a finetuning.

    Args:
        num_epochs: passes over the training set; 0 scores the checkpoint as it is.
        warmup_fraction: part of all updates in which the learning rate rises; it then falls to 0.
        schedule_formula: of `ScheduleConfig`; `megatron_v1` falls to 2 x warmup_fraction of the peak.
        max_train_examples: use only this many examples (SQuAD: windows) of the training set, for trials; None: all.
        score_every_epoch: score after each epoch, or only at the end.
        pool_batches: examples of similar length are grouped within this many batches; 1: in shuffled order.
        scoring_batch_size: sequences of a rank's forward pass while scoring.
        save: write a checkpoint at the end.
        log_every_steps: steps between rows of metrics.csv.
    """

    num_epochs: Count
    warmup_fraction: Fraction
    schedule_formula: Formula = "paper"
    max_train_examples: Positive | None = None
    score_every_epoch: bool = True
    pool_batches: Positive = 64
    scoring_batch_size: Positive = 64
    save: bool = True
    log_every_steps: Positive = 10

    def check_rules(self) -> None:
        # The rate would rise above the peak.
        is_above = self.schedule_formula == "megatron_v1" and self.warmup_fraction > 0.5
        require(self, "warmup_fraction", "at most 0.5 with `schedule_formula`=megatron_v1", not is_above)


@dataclass(frozen=True)
class FinetuneConfig(TrainingRequest, EntryConfig):
    """One finetuning of a BERT.

    Args:
        run_dir: Hydra's run folder.
        ckpt: checkpoint of lmscale at any layout (pretrained, imported or finetuned), or a folder with `step_*.ckpt`.
        size: row of Table 6.
        from_scratch: draw all weights from the seed; the checkpoint gives sizes and tokenizer. A control.
        new_pooler: draw the pooler from the seed if the checkpoint has no trained one.
        micro_batch_size: examples (questions of RACE, windows of SQuAD) per rank and forward pass.
        global_batch_size: examples of a step over all ranks; the last step of an epoch may have fewer.
        cache_dir: encoded inputs are in its folder `finetune`; None means $LMSCALE_CACHE or ~/.cache/lmscale.
        hidden_dropout: of sublayer outputs; None: the checkpoint's.
        attention_dropout: of attention probabilities; None: the checkpoint's.
        head_dropout: before the head; None: the hidden one.
        attention: `sdpa`, or `exact`, whose dropout does not depend on the layout.
        recompute: `none`, `selective` or `full`; see the model's key in pretraining.
        seed: of the head, the order and dropout.
        objective: metric that the run returns to a searching sweeper; None: the task's own.
        fidelity: which source sets the points on which the paper and the released code differ.
    """

    run_dir: str
    ckpt: PathText
    task: TaskConfig
    size: str
    tokenizer: TokenizerPath
    trainer: FinetuneTrainer
    cache_dir: PathText | None = None
    from_scratch: bool = False
    new_pooler: bool = False
    hidden_dropout: Fraction | None = None
    attention_dropout: Fraction | None = None
    head_dropout: Fraction | None = None
    attention: Literal["sdpa", "exact"] = "sdpa"
    recompute: str = "none"
    seed: Seed = 1234
    objective: str | None = None
    fidelity: str = "paper"
    overrides: list = field(default_factory=list)

    def check_rules(self) -> None:
        super().check_rules()
        self.precision.refuse_float8()
        # Batches are as long as their longest input, and layers are not compiled.
        for name in ("sequence_parallel", "batch_halves"):
            require(self, f"parallel.{name}", "false for a finetuning", not getattr(self.parallel, name))
        self.parallel.refuse_stages()
        require(self, "parallel.tp_size", "a whole number for a finetuning", self.parallel.tp_size != "auto")
        has_rows = not self.trainer.num_epochs or self.task.train is not None
        require(self, "task.train", "given where `trainer.num_epochs` is above 0", has_rows)
        if not self.task.scored_sets():
            raise ValueError("`task.validation` or `task.test` must have a set to score, but both have none")
        if self.trainer.num_epochs and not self.task.chosen_on():
            raise ValueError("`task.validation` must have a set where something is trained, but has none")

    @classmethod
    def from_dict(cls, values: dict) -> "FinetuneConfig":
        """As in `EntryConfig`; the task's sets are located."""
        run = super().from_dict(values)
        return replace(run, task=run.task.located())

    def schedule(self, num_steps: int) -> ScheduleConfig:
        """Warm-up over `warmup_fraction` of the updates, then a linear decay to 0 by the formula."""
        warmup_steps, formula = round(self.trainer.warmup_fraction * num_steps), self.trainer.schedule_formula
        return ScheduleConfig("linear", warmup_steps, max(1, num_steps), formula=formula)

    def digest(self) -> str:
        """sha256 of all values but the run folder and the text of the overrides, which has absolute paths."""
        values = self.to_dict() | {"run_dir": "", "overrides": []}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
