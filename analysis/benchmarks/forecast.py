"""What the rows of `analysis/benchmarks/h200.sh` show, by the planner.

    python analysis/benchmarks/forecast.py                # the rows, what binds in them, and what changes would give
    python analysis/benchmarks/forecast.py --card h100    # the rows that fit another card
    python analysis/benchmarks/forecast.py compare        # beside the records that are there
    python analysis/benchmarks/forecast.py fits COMMAND   # why the models of a command do not fit the card

Sizes are those of the script's own commands (DRY_RUN=1); the constants are those of
analysis/benchmarks/records/roofline.json. Rows that have run before have their forecast in `h200_forecast.json` and
`h100_forecast.json`, which stay.
"""

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import yaml

from analysis.benchmarks.config import PADDED_VOCABULARIES
from analysis.scaling.study import with_rates
from lmscale.cli.errors import one_line_errors
from lmscale.config import RECOMPUTE_MODES, Layout, TransformerConfig
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.config.model import WITHOUT_DROPOUT
from lmscale.planner.memory import GIB
from lmscale.planner.plan import Plan
from lmscale.planner.search import with_busy_device
from lmscale.planner.step_operations import HOST_SYNCS
from lmscale.planner.workload import Workload
from lmscale.results import new_record, path_argument, record_argument, report

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "analysis" / "benchmarks" / "records"
CARDS = {"h200": "h200", "h100": "h100", "a100": "dgx_a100", "v100": "dgx2h_v100"}  # and their files in conf/cluster
PEAK = 790e12  # large bf16 products on one H200
GRAPH_LAUNCH_US = 0.5  # between the kernels of a replayed graph, assumed
CUDNN_TFLOPS = {"attention_forward_tflops": 595.0, "attention_backward_tflops": 516.0}  # Shah et al. 2024
ONE_DEVICE = Layout()
FLOAT8 = "gpt_2.5b, fp8"
# What the card is to show at the recipe's batch: model, tensor ranks, micro-batch, type -> share of the peak
# as modelled; of a model that has run, times measured over modelled.
GOALS = {
    "gpt_1.2b": (1, 32, "bf16", 0.65),
    "bert_3.9b": (1, 24, "bf16", 0.66),
    "bert_336m": (1, 128, "bf16", 0.54),
    "gpt_8.3b": (8, 8, "bf16", 0.44),
    FLOAT8: (1, 8, "fp8", 0.68),
}
RECIPE = "at the recipe's batch"
HOST_SHARE = 0.4  # of the device's time that the host may take
OPTIONS = "sequence_parallel", "batch_halves"  # of the layout, with several tensor ranks
DROPOUTS = "hidden_dropout", "attention_dropout"


@dataclass(frozen=True)
class Row:
    """One measured step of the script: the name of its record, how its metrics' names begin there, and its plan."""

    record: str
    prefix: str
    plan: Plan

    @property
    def name(self) -> str:
        """How the names of its forecast metrics begin: the record, then the names in the record."""
        return f"{self.record.partition('_')[2]}/{self.prefix}"


def record_of(card: str) -> Path:
    """The forecast of the rows of a card that are still to be run."""
    return RECORDS / f"{card}_forecast_2.json"


RECORD = record_of("h200")


def cluster_of(card: str, graphs: bool = False, **rates: float) -> Cluster:
    """The cluster of a card, with CUDA graphs or other rates."""
    if graphs:
        rates["launch_us"] = GRAPH_LAUNCH_US
    return with_rates(load_cluster(ROOT / "conf" / "cluster" / f"{CARDS[card]}.yaml"), **rates)


def model(name: str) -> TransformerConfig:
    """A model of conf/model as the comparison builds it: nothing recomputed, a fused attention core."""
    folder = ROOT / "conf" / "model"
    sizes = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    base = sizes.pop("defaults")[0].split("@")[0]
    values = yaml.safe_load((folder / f"{base}.yaml").read_text(encoding="utf-8")) | sizes
    vocab_size = values["vocab_size"] or PADDED_VOCABULARIES[values["family"]]
    return TransformerConfig(**values | {"vocab_size": vocab_size, "recompute": "none", "attention": "sdpa"})


def plan_of(
    name: str,
    micro_batch_size: int,
    dtype: str,
    cluster: Cluster,
    num_micro_batches: int = 1,
    layout: Layout = ONE_DEVICE,
    half_moments: bool = False,
    **changes: Any,
) -> Plan:
    """The plan of one step on the devices of a layout, of the model with some fields changed."""
    config = dataclasses.replace(model(name), **changes)
    batch, s = micro_batch_size * num_micro_batches * layout.dp_size, config.max_position_embeddings
    return Plan(Workload(config, micro_batch_size, batch, s, dtype, 1, half_moments, compiles=True), layout, cluster)


def commands(*lists: str, card: str = "h200") -> list[list[str]]:
    """The commands of some lists of the script, in words."""
    environment = os.environ | {"DRY_RUN": "1", "NANOGPT": "model.py", "CARD": card}
    script = ["bash", str(ROOT / "analysis" / "benchmarks" / "h200.sh"), *lists]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def rows(card: str = "h200") -> list[Row]:
    """Every timed step of the script that fits the card."""
    found = commands("a", "b", "d", "e", card=card)
    return [row for words in found if left_out(words, card) is None for row in rows_of(words, card)]


def measured_rows(card: str = "h200") -> list[Row]:
    """Every timed step that has a record, by the command that the record names."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob(f"{card}_*.json"))]
    return [row for record in records for row in rows_of(shlex.split(record["command"]), card)]


def rows_of(words: list[str], card: str) -> list[Row]:
    """The timed step of a command; none of a command that has no plan."""
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    script = next((word for word in words if word.endswith(("bench.py", "train.py"))), None)
    if script is None or "micro_batch_size" not in keys or keys["model"].endswith("_tiny"):
        return []  # sizes of an experiment, or of a model of which nothing is timed
    b, dtype, attention = int(keys["micro_batch_size"]), keys.get("precision", "bf16"), keys.get("model.attention")
    rates = CUDNN_TFLOPS if attention in WITHOUT_DROPOUT else {}  # FlashAttention-3's too: about as fast
    cluster = cluster_of(card, keys.get("cuda_graphs") == "true", **rates)
    options = {"half_moments": keys.get("optimizer.moments") == "bf16"}
    options |= {name: float(keys[f"model.{name}"]) for name in DROPOUTS if f"model.{name}" in keys}
    names = {field.name: f"parallel.{field.name}" for field in dataclasses.fields(Layout)}
    layout = Layout(**{name: json.loads(keys[key]) for name, key in names.items() if key in keys})
    count = int(keys.get("global_batch_size", b * layout.dp_size)) // (b * layout.dp_size)
    if script.endswith("train.py"):
        modes = [keys["model.recompute"]] if "model.recompute" in keys else RECOMPUTE_MODES
        name, prefix = keys["name"], "train/"
    else:
        modes = [keys.get("model.recompute", "none")]
        name, prefix = Path(keys["record"]).stem, "" if "trace" in keys else "ours/"
    plans = [plan_of(keys["model"], b, dtype, cluster, count, layout, recompute=mode, **options) for mode in modes]
    return [Row(name, prefix, next((plan for plan in plans if plan.missing_bytes <= 0), plans[-1]))]


def left_out(words: list[str], card: str, gib: float | None = None) -> str | None:
    """Why the model of a command does not fit the device; None if it does.

    Args:
        gib: memory of the device; None: as the card's cluster has it.
    """
    found, cluster = rows_of(words, card), cluster_of(card)
    needed = sum(row.plan.needed_bytes / GIB + cluster.reserved_gib for row in found)
    there = cluster.memory_gib if gib is None else gib
    return f"needs {needed:.1f} GiB, and the {card} has {there:.1f}" if found and needed > there else None


def share_of(plan: Plan) -> float:
    """Model FLOPs per second and device over the measured peak."""
    return plan.model_flops / plan.layout.world_size / plan.time.total / PEAK


def metrics_of(name: str, plan: Plan, traced: bool = False) -> dict[str, dict]:
    """The figures of one step; `name` is how their names begin. A traced step is not timed: tracing slows it."""
    timed = {
        f"{name}step": {"value": plan.time.total, "unit": "s"},
        f"{name}share_of_given_peak": {"value": share_of(plan), "unit": "of 790 TFLOP/s"},
    }
    return ({} if traced else timed) | {
        f"{name}memory_peak": {"value": plan.needed_bytes / GIB, "unit": "GiB"},
        f"{name}launches": {"value": sum(row.launches for row in plan.rows), "unit": "kernels/step"},
        f"{name}host_syncs": {"value": HOST_SYNCS, "unit": "per step"},
    }


def binds(plan: Plan) -> dict[str, float]:
    """Shares of the step: what it waits for."""
    found: dict[str, float] = {}
    for row in plan.rows:
        kind = "attention core" if row.name == "attention core" else row.bound
        kind = row.phase if row.phase in ("optimizer", "gradients") else kind
        if row.seconds:
            found[kind] = found.get(kind, 0.0) + row.seconds / plan.time.total
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def host(plan: Plan) -> dict[str, float | str]:
    """Milliseconds of the host and of the device, and what brings the host to `HOST_SHARE` of the device's time."""
    time = plan.time
    found = {"host_ms": 1e3 * (time.host + time.host_hidden), "device_ms": 1e3 * (time.total - time.host)}
    if time.host_share <= HOST_SHARE:
        return found
    better = with_busy_device(plan, HOST_SHARE)
    way_out = f"micro_batch_size={better.job.micro_batch_size}" if better else "no micro-batch that fits"
    return found | {f"at most {HOST_SHARE:.0%} with": way_out, "host-bound": "yes" if time.host else "no"}


def options_of(name: str) -> dict[str, bool]:
    """The layout's options for one of `GOALS`."""
    return dict.fromkeys(OPTIONS, True) if GOALS[name][0] > 1 else {}


def goal_plan(name: str, cluster: Cluster, of_recipe: bool = False, **options: bool) -> Plan:
    """The plan of one of `GOALS`, with options of its layout.

    Args:
        of_recipe: of a step of the recipe's batch, in micro-batches that divide it, and not of one micro-batch.
    """
    (tp_size, b, dtype, _), count, name = GOALS[name], 1, name.split(",")[0]
    if of_recipe:
        path = ROOT / "conf" / "recipe" / "base" / f"paper_{model(name).family}.yaml"
        batch = yaml.safe_load(path.read_text(encoding="utf-8"))["global_batch_size"]
        b = next(size for size in range(b, 0, -1) if batch % size == 0)
        count = batch // b
    return plan_of(name, b, dtype, cluster, count, Layout(tp_size=tp_size, **options))


def goals() -> dict[str, dict[str, float]]:
    """The share of the peak of each goal's model as it is, with `OPTIONS` where there are several tensor ranks, and
    with another attention kernel: each change is added to those before it."""
    found: dict[str, dict[str, float]] = {}
    for name, (*_, goal) in GOALS.items():
        found[name] = {"goal": goal, "as it is": share_of(goal_plan(name, cluster_of("h200")))}
        options = {}
        for option in options_of(name):
            options[option] = True
            found[name][f"with {option}"] = share_of(goal_plan(name, cluster_of("h200"), **options))
        found[name][RECIPE] = share_of(goal_plan(name, cluster_of("h200"), of_recipe=True, **options))
        cudnn = cluster_of("h200", **CUDNN_TFLOPS)
        found[name]["attention core of cuDNN"] = share_of(goal_plan(name, cudnn, of_recipe=True, **options))
    return found


def forecast(card: str = "h200") -> dict:
    """The record; the goals are the H200's."""
    found, metrics = rows(card), {}
    for row in found:
        metrics |= metrics_of(row.name, row.plan, traced=not row.prefix)
    aimed = GOALS if card == "h200" else ()
    aims = {f"goal {name}": goal_plan(name, cluster_of(card), **options_of(name)) for name in aimed}
    for name, plan in aims.items():
        metrics |= metrics_of(f"{name}/", plan)
    config = {
        "cluster": dataclasses.asdict(cluster_of(card)),
        "binds": {row.name.rstrip("/"): binds(row.plan) for row in found},
        "host": {name: host(plan) for name, plan in ({row.name.rstrip("/"): row.plan for row in found} | aims).items()},
        "goals": goals() if card == "h200" else {},
        "model": "planner/step_time.py; constants: analysis/benchmarks/records/roofline.json",
    }
    return new_record(f"{card}_forecast", "modelled", config, None, metrics)


def compare(forecasts: dict, folder: Path, card: str = "h200") -> str:
    """Forecast and measurement of every row that was run, and their ratio."""
    lines = [f"{'row':<28}{'':<28}{'forecast':>12}{'measured':>12}{'ratio':>8}"]
    for name, entry in forecasts["metrics"].items():
        if name.startswith("goal "):
            continue
        record, _, metric = name.partition("/")
        path = folder / f"{card}_{record}.json"
        found = json.loads(path.read_text(encoding="utf-8"))["metrics"] if path.exists() else {}
        measured = found.get(metric, {}).get("value")
        if measured is not None:
            ratio = f"{measured / entry['value']:.3f}" if entry["value"] else ""
            lines.append(f"{record:<28}{metric:<28}{entry['value']:>12.4g}{measured:>12.4g}{ratio:>8}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "no row was run yet"])


@one_line_errors()
def main() -> int:
    """Print the forecast, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", nargs="?", choices=("print", "compare", "fits"), default="print")
    parser.add_argument("--card", choices=CARDS, default="h200")
    parser.add_argument("--gib", type=float, help="memory of the card, for `fits`")
    parser.add_argument("--record", type=record_argument, help="file of a new forecast, or the one to compare")
    parser.add_argument("--results", type=path_argument, default=RECORDS, help="folder of the rows' records")
    options, words = parser.parse_known_args()
    if options.what == "fits":
        print(left_out(words, options.card, options.gib) or "", end="")
        return 0
    if words:
        parser.error(f"unknown arguments: {' '.join(words)}")
    if options.what == "compare":
        path = options.record or record_of(options.card)
        print(compare(json.loads(path.read_text(encoding="utf-8")), options.results, options.card))
        return 0
    record = forecast(options.card)
    for name, shares in record["config"]["binds"].items():
        print(f"{name:<34}" + ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items()))
    for name, entries in record["config"]["host"].items():
        words = [f"{entry:.0f}" if isinstance(entry, float) else entry for entry in entries.values()]
        print(f"{name:<34}" + ", ".join(f"{what} {word}" for what, word in zip(entries, words, strict=True)))
    for name, shares in record["config"]["goals"].items():
        print(f"{name:<16}" + ", ".join(f"{change} {share:.3f}" for change, share in shares.items()))
    report(record, options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
