"""`make demo`: pretrain a tiny GPT and a tiny BERT at tp_size 2 on real text, and show their loss.

Runs `src/train.py` twice, as a user would, then reads the two records and draws the loss curves.
Exit code 1 if a model does not reach the required loss.

    python analysis/demo/demo.py --record analysis/demo/records/demo.json     # also write a record
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)
import pandas as pd  # noqa: E402
import seaborn as sns  # noqa: E402

from lmscale.results import new_record, record_argument, write_record  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "outputs" / "demo"
STEPS = 200  # per model; about a minute on two cores
MARGIN_NATS = 0.5  # required improvement: GPT over the unigram loss, BERT over its initial loss


def train(model: str) -> Path:
    """Pretrain `model` at tp_size 2; returns its run folder."""
    run_dir = OUTPUT / f"{model}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    overrides = [f"model={model}", "parallel.tp_size=2", f"trainer.max_steps={STEPS}"]
    print(f"$ python src/train.py {' '.join(overrides)}", flush=True)
    command = [sys.executable, REPOSITORY / "src" / "train.py", *overrides, f"hydra.run.dir={run_dir}"]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    return run_dir


def read_metrics(run_dir: Path) -> dict[str, float]:
    """Read the metrics of a run's record by name."""
    record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    return {name: entry["value"] for name, entry in record["metrics"].items()}


def draw(runs: dict[str, tuple[Path, str, float]], path: Path) -> None:
    """Draw training and validation loss of each run, with the unigram loss as reference."""
    sns.set_theme(style="whitegrid", context="paper")
    figure, axes = plt.subplots(1, len(runs), figsize=(7.0, 2.8), constrained_layout=True)
    for axis, (name, (run_dir, term, unigram)) in zip(axes, runs.items(), strict=True):
        frame = pd.read_csv(run_dir / "metrics.csv")
        train_column = f"train/{term}" if f"train/{term}" in frame else "train/loss"
        sns.lineplot(frame, x="step", y=train_column, ax=axis, label="training", color="0.6", linewidth=0.8)
        validation = frame.dropna(subset=[f"val/{term}"])
        sns.lineplot(validation, x="step", y=f"val/{term}", ax=axis, label="validation", color="black", marker="o")
        axis.axhline(unigram, color="black", linestyle="--", linewidth=0.8, label="unigram")
        axis.set(title=name, xlabel="optimizer step", ylabel="loss (nats per token)")
        axis.legend()
    figure.savefig(path, dpi=150)


def record_losses(gpt: dict[str, float], bert: dict[str, float], path: Path) -> None:
    """Write one record of both runs' losses."""
    metrics = {}
    for model, values, term in (("gpt", gpt, "loss"), ("bert", bert, "lm_loss")):
        names = {"before": f"val_start/{term}", "after": f"val/{term}", "unigram": "val/unigram_cross_entropy"}
        metrics |= {f"{model}/{name}": {"value": values[key], "unit": "nats/token"} for name, key in names.items()}
    layout = {"tp_size": 2, "dp_size": 1}
    write_record(new_record("demo", "scaled_down", {"max_steps": STEPS}, 1234, metrics, layout=layout), path)


def main() -> int:
    """Train both models, print initial and final losses, and check the required improvement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, help="path of a record of both runs; none by default")
    options = parser.parse_args()
    start = time.time()
    gpt_dir, bert_dir = train("gpt_tiny"), train("bert_tiny")
    gpt, bert = read_metrics(gpt_dir), read_metrics(bert_dir)
    picture = OUTPUT / "loss_curves.png"
    gpt_unigram, bert_unigram = gpt["val/unigram_cross_entropy"], bert["val/unigram_cross_entropy"]
    draw(
        {
            "GPT (next token)": (gpt_dir, "loss", gpt_unigram),
            "BERT (masked token)": (bert_dir, "lm_loss", bert_unigram),
        },
        picture,
    )
    if options.record:
        record_losses(gpt, bert, options.record)
    gpt_margin = gpt_unigram - gpt["val/loss"]
    bert_gain = bert["val_start/lm_loss"] - bert["val/lm_loss"]
    print(
        f"\nGPT   validation loss {gpt['val_start/loss']:.3f} -> {gpt['val/loss']:.3f} nats; unigram loss "
        f"{gpt_unigram:.3f} on the same text: {gpt_margin:.3f} lower (required: {MARGIN_NATS})\n"
        f"BERT  masked loss     {bert['val_start/lm_loss']:.3f} -> {bert['val/lm_loss']:.3f} nats: {bert_gain:.3f} "
        f"lower (required: {MARGIN_NATS}); unigram loss {bert_unigram:.3f}\n"
    )
    for name, run_dir in (("GPT", gpt_dir), ("BERT", bert_dir)):
        print(f"{name:5} run {run_dir}\n      record {run_dir / 'record.json'}")
    print(f"loss curves {picture}\ntime {time.time() - start:.0f} s")
    return 0 if gpt_margin >= MARGIN_NATS and bert_gain >= MARGIN_NATS else 1


if __name__ == "__main__":
    sys.exit(main())
