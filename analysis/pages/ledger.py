"""The ledger: every number of the paper with ours, from records, exact counts, the cost model or the configuration.

`paper.yaml` names the sources of each number; the first that gives a value is used. No value of ours is typed here.
"""

import dataclasses
import math
import operator
import shlex
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pandas as pd

from analysis.ledger.entries import ENTRIES, SHORT_FORM, Entry
from analysis.norm_order.cells import STATES
from analysis.scaling.sizes import paper_models
from analysis.scaling.study import BASELINE_FLOPS_PER_S, MICRO_BATCH, predict_petaflops
from lmscale.config import Layout
from lmscale.config.cluster import Cluster
from lmscale.paper import SEQ_LENGTH
from lmscale.planner.communication import Collective, micro_batch_collectives
from lmscale.planner.flops import TERA
from lmscale.planner.params import count_parameters
from lmscale.planner.workload import Workload

REPRODUCED, COUNTED, SCALED_DOWN = "reproduced", "counted", "scaled down"
MODELLED, SETTING, NOT_RUN = "modelled", "setting", "not run"
KINDS = {
    REPRODUCED: "reached by training a model of the paper's size in the paper's setting",
    COUNTED: "counted exactly by our code, without training: parameters, rows, messages",
    SCALED_DOWN: "measured on a smaller model or other data, as stated; not comparable with the paper's value",
    MODELLED: "computed by the cost model, which was fitted to part of the paper's scaling study",
    SETTING: "an input, not a result: what the command sets or the cost model takes from the paper",
    NOT_RUN: "we have no value, for the stated reason",
}
COLUMNS = ("id", "paper", "ours", "unit", "evidence", "from", "origin", "command")
_OF_RECORD = {"run": REPRODUCED, "scaled_down": SCALED_DOWN, "modelled": MODELLED}
_DEFINED = ("by definition", "the anchor")  # evidence in the baseline's cells
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "100 / n": lambda n: 100 / n,
    "n - 1": lambda n: n - 1,
    "n / 8": lambda n: n / 8,
    "length": lambda text: len(text.split(",")),
    "std / sqrt(2 layers)": lambda scaled: "std / sqrt(2 layers)" if scaled else "std",
}


@dataclass(frozen=True)
class Context:
    """The sources of evidence.

    Args:
        records: by name, from `read_records`.
        tables: rows of the rendered tables by name, with columns `configuration`, `unit`, `ours` and `evidence`.
        settings: contents of `conf/` by path below it.
        cluster: the fitted cluster of `cost_model.json`.
    """

    records: Mapping[str, dict[str, Any]]
    tables: Mapping[str, pd.DataFrame]
    settings: Mapping[str, dict[str, Any]]
    cluster: Cluster

    def setting(self, file: str, key: str) -> Any:
        """Value of a key in a file of `conf/`; groups are separated by `/`, because names of sizes contain dots."""
        value = self.settings[file]
        for part in key.split("/"):
            value = value[part]
        return value


@dataclass(frozen=True)
class Found:
    """Our value for a number of the paper.

    Args:
        kind: one of `KINDS`.
        source: the record or code that provides it, or why there is none.
        ours: None if there is no value.
        unit: only if it differs from the paper's.
    """

    kind: str
    source: str
    ours: float | str | None = None
    unit: str | None = None


def find(entry: Entry, context: Context) -> Found:
    """Return the value of the first source that has one, else the reason why there is none."""
    found = _recorded("*", entry.id, "its metric of this name", None, context)
    for source, look in _SOURCES.items():
        if found is None and source in entry.source:
            found = look(entry, context)
    return found or Found(NOT_RUN, entry.source.get("why", ""))


def _table_row(entry: Entry, context: Context) -> Found | None:
    rows = context.tables[entry.source["table"]]
    row = rows[(rows["configuration"] == entry.source["row"]) & (rows["unit"] == entry.unit)].iloc[0]
    kind, _, role = row["evidence"].partition(", ")
    if kind == NOT_RUN:
        return None
    if kind == "exact":
        return Found(COUNTED, "counted by `lmscale.planner.params`", row["ours"])
    if kind in _DEFINED:
        return Found(SETTING, kind, row["ours"])
    record = f"`{row['record']}`" if kind == REPRODUCED else "`cost_model.json`"
    return Found(kind, ", ".join(filter(None, (record, role))), row["ours"])


def _small_row(entry: Entry, context: Context) -> Found | None:
    rows = context.tables[entry.source["small_in"]]
    rows = rows[(rows["unit"] == entry.unit) & (rows["evidence"] == SCALED_DOWN)]
    if rows.empty:
        return None
    row = rows.iloc[0]
    return Found(SCALED_DOWN, f"`{row['record']}`: {row['configuration']}", row["ours"])


def _record(entry: Entry, context: Context) -> Found | None:
    source = entry.source
    record, metric, what, unit = source["record"], source["metric"], source["what"], source.get("record_unit")
    if isinstance(metric, str):
        return _recorded(record, metric, what, unit, context)
    arms = {arm: _recorded(record, each, what, unit, context) for arm, each in metric.items()}
    if None in arms.values():
        return None
    first, values = next(iter(arms.values())), ", ".join(f"{arm} {found.ours:.4g}" for arm, found in arms.items())
    return Found(first.kind, first.source, f"{values} ({first.unit})")


def _recorded(pattern: str, metric: str, what: str, unit: str | None, context: Context) -> Found | None:
    """Median of a metric over the records whose name matches a pattern, in the record's unit."""
    records = {name: r for name, r in sorted(context.records.items()) if fnmatchcase(name, pattern)}
    found = {name: record for name, record in records.items() if metric in record["metrics"]}
    if not found:
        return None
    entries = [record["metrics"][metric] for record in found.values()]
    values = [float(entry["non_finite"]) if "non_finite" in entry else entry["value"] for entry in entries]
    first, several = next(iter(found)), f" and {len(found) - 1} more, median" if len(found) > 1 else ""
    stated = entries[0]["unit"]
    in_unit = unit or (None if stated == "count" else stated)
    return Found(_OF_RECORD[found[first]["kind"]], f"`{first}`{several}: {what}", statistics.median(values), in_unit)


def _norm_order(entry: Entry, context: Context) -> Found | None:
    """Outcomes and loss of the norm-order study at the depth that represents the paper's model."""
    order, depth = entry.source["norm_order"], entry.source["layers"]
    metrics = context.records["norm_order.json"]["metrics"]
    place = f"{depth}_layers/scaled"
    if f"{place}/{order}/learned" not in metrics:
        return None
    counts = {state: metrics[f"{place}/{order}/{state}"]["value"] for state in STATES}
    ended = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    loss, rate = metrics.get(f"{place}/{order}"), metrics[f"{place}/lr_{order}"]["value"]
    end = "" if loss is None else f": {loss['value']:.3f} {loss['unit']}"
    what = f"runs of a small BERT whose {depth} layers stand for this model, learning rate {rate:g}"
    return Found(SCALED_DOWN, f"`norm_order.json`: {what}", f"{ended}{end}")


def _setting(entry: Entry, context: Context) -> Found:
    """A key of a file in `conf/`, or the difference (`-`) or quotient (`/`) of two."""
    file, words = entry.source["conf"], entry.source["key"].split(" ")
    value = context.setting(file, words[0])
    if len(words) == 3:
        value = {"-": operator.sub, "/": operator.truediv}[words[1]](value, context.setting(file, words[2]))
    shown = " ".join(word if word == "/" else word.replace("/", ".") for word in words)
    convert = _CONVERSIONS.get(entry.source.get("as"), lambda value: value)
    return Found(SETTING, f"`conf/{file}`, `{shown}`", convert(value))


def _in_command(entry: Entry, context: Context) -> Found:
    keys = entry.source["in_command"].split(" x ")
    values = dict(word.split("=", 1) for word in shlex.split(entry.command) if "=" in word)
    product = math.prod(int(values[key]) for key in keys)
    return Found(SETTING, "the command: " + " x ".join(f"`{key}`" for key in keys), product)


def _parameters(entry: Entry, context: Context) -> Found:
    scale = {"billion parameters": 1e9, "million parameters": 1e6}[entry.unit]
    count = count_parameters(paper_models()[entry.source["of"]]).total / scale
    return Found(COUNTED, "counted by `lmscale.planner.params`", count)


@cache
def _sent() -> tuple[Collective, ...]:
    """Messages of the 2.5 B model's tensor ranks in one micro-batch, without recomputation, which would repeat some."""
    config = dataclasses.replace(paper_models()["gpt_2.5b"], recompute="none")
    job = Workload(config, MICRO_BATCH, MICRO_BATCH, SEQ_LENGTH, "fp16", on_gpu=False)
    return tuple(micro_batch_collectives(job, Layout(tp_size=2)))


def _messages(what: str, attribute: str, over: float, note: str = "") -> Callable[[Entry, Context], Found]:
    def count(entry: Entry, context: Context) -> Found:
        number = sum(getattr(each, attribute) for each in _sent() if each.what == what) / over
        return Found(COUNTED, f"counted by `lmscale.planner.communication`{note}", number)

    return count


def _trained_tokens(entry: Entry, context: Context) -> Found:
    """Number of steps relative to 336M, at the same batch size."""
    steps, file = context.setting("recipe/base/paper_bert.yaml", "trainer/max_steps"), entry.source["of"]
    own = context.settings[file].get("trainer", {}).get("max_steps", steps)
    return Found(SETTING, f"`conf/{file}`, `trainer.max_steps` over that of 336M", own / steps)


_LAYERS, _HIDDEN = paper_models()["gpt_2.5b"].num_layers, paper_models()["gpt_2.5b"].hidden_size
_POSITIONS = MICRO_BATCH * SEQ_LENGTH
_BASELINE = BASELINE_FLOPS_PER_S / TERA
_OF_THE_LOSS = ": maxima, sums and target logits per row, of which the paper's formula needs the last two"
_COMPUTED: dict[str, Callable[[Entry, Context], Found]] = {
    "parameters": _parameters,
    "trained_tokens": _trained_tokens,
    "ensemble": lambda entry, _: Found(SETTING, "the command: its run folders", entry.command.count("multirun/")),
    "padded vocabulary": lambda *_: Found(
        COUNTED, "counted by `lmscale.config`", paper_models()["gpt_8.3b"].padded_vocab_size
    ),
    "all-reduces forward": _messages("attention and MLP outputs", "count", _LAYERS),
    "all-reduces backward": _messages("gradients of attention and MLP inputs", "count", _LAYERS),
    "elements of an all-reduce": _messages("attention and MLP outputs", "num_bytes", 2 * _POSITIONS * _HIDDEN),  # fp16
    "all-reduces of the embedding": _messages("embedding", "count", 1),
    "numbers of the loss": _messages("loss", "total_bytes", 4 * _POSITIONS, _OF_THE_LOSS),  # fp32
    "one": lambda *_: Found(SETTING, "by definition", 1.0),
    "baseline": lambda *_: Found(SETTING, "the cost model is anchored at this value", _BASELINE),
    "baseline share": lambda _, context: Found(
        SETTING, "39 TFLOP/s over the cluster's peak", 100 * _BASELINE / context.cluster.peaks.fp16
    ),
    "bandwidth in a server": lambda _, context: Found(
        MODELLED, "`cost_model.json`, effective, fitted", context.cluster.calibration.tensor_bandwidth_gb_s
    ),
    "bandwidth between servers": lambda _, context: Found(
        MODELLED, "`cost_model.json`, effective, fitted", context.cluster.calibration.data_bandwidth_gb_s
    ),
    "efficiency on 512 GPUs": lambda _, context: Found(
        MODELLED,
        "`cost_model.json`, PFLOP/s on 512 GPUs over 512 x 39 TFLOP/s",
        100 * predict_petaflops(context.cluster) * 1e3 / (512 * _BASELINE),
    ),
}
_SOURCES: dict[str, Callable[[Entry, Context], Found | None]] = {
    "table": _table_row,
    "small_in": _small_row,
    "record": _record,
    "norm_order": _norm_order,
    "conf": _setting,
    "in_command": _in_command,
    "computed": lambda entry, context: _COMPUTED[entry.source["computed"]](entry, context),
}


def ledger(context: Context) -> pd.DataFrame:
    """One row per entry, in the order of `paper.yaml`.

    Returns:
        columns `COLUMNS`: `ours` is in the paper's unit, or text with its own; `from` is the record, the code, the key,
        or why there is none; `origin` is how the paper's value was obtained.
    """
    rows = []
    for entry in ENTRIES:
        found = find(entry, context)
        ours = found.ours
        if found.unit is not None and not entry.unit.endswith(found.unit):
            ours = f"{ours:.4g} ({found.unit})"
        row = (entry.id, entry.paper, ours, entry.unit, found.kind, found.source, entry.origin, entry.command)
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)


def heading(place: str) -> str:
    """Heading of a place in the paper: `Table 1`, `Section 4.1`, `Appendix C`."""
    word, _, number = place.partition("_")
    return f"{word.capitalize()} {number.upper()}".rstrip()


def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """Number of entries per kind of evidence: columns `evidence`, `numbers`, `meaning`."""
    counts = rows["evidence"].value_counts()
    found = [(kind, int(counts.get(kind, 0)), meaning) for kind, meaning in KINDS.items()]
    return pd.DataFrame(found, columns=["evidence", "numbers", "meaning"])


def status(rows: pd.DataFrame) -> str:
    """How many numbers were counted, modelled or reached by training."""
    of = kinds(rows).set_index("evidence")["numbers"]
    return (
        f"Of the paper's {len(rows)} numbers, {of[SETTING]} are settings of its runs. Of the other "
        f"{len(rows) - of[SETTING]}, {of[COUNTED]} are counted exactly, {of[MODELLED]} are modelled, {of[SCALED_DOWN]} "
        f"were measured on models scaled down and are not comparable, and {of[NOT_RUN]} were not run. Training at the "
        f"paper's size reached {of[REPRODUCED] or 'none'} of them."
    )


def short_form(rows: pd.DataFrame) -> pd.DataFrame:
    """The main rows: columns `where`, `paper`, `ours`, `unit`, `evidence`.

    `evidence` also names what was scaled down, and for a cell of the cost model whether it was in the fit.
    """
    main = rows.set_index("id").loc[list(SHORT_FORM), ["paper", "ours", "unit", "evidence", "from"]]
    small = main["evidence"] == SCALED_DOWN
    main.loc[small, "evidence"] += ": " + main.loc[small, "from"].str.split(": ", n=1).str[1]
    role = main["from"].str.extract(r"`cost_model.json`, (\w.*)$")[0].replace("fit", "fitted to it")
    main.loc[role.notna(), "evidence"] += ", " + role.dropna()
    main = main.drop(columns="from")
    main.insert(0, "where", list(SHORT_FORM.values()))
    return main.reset_index(drop=True)
