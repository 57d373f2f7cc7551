"""`make demo`: pretrain a tiny GPT and a tiny BERT at tp_size 2 on real text, and compare them with n-gram models.

Runs `src/train.py` twice, as a user would, then reads the two records and draws the loss curves.
Exit code 1 if a model does not reach the required loss.

    python analysis/demo/demo.py --record analysis/demo/records/demo.json     # also write a record
"""

import argparse
import json
import math
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import matplotlib

matplotlib.use("Agg")  # no display is needed

import numpy as np
import pandas as pd

from analysis.demo.ngram import context_free_losses, kneser_ney_losses
from analysis.report.style import BLUE, GREY, house_style, label_ends, page_figure
from analysis.running import run_python
from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.config.from_dict import build
from lmscale.data.bert_dataset import IGNORE_LABEL
from lmscale.data.prepare import prepare_corpus, unigram_cross_entropy
from lmscale.data.tokenizer import END_OF_TEXT
from lmscale.results import new_record, record_argument, write_record

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT, COMMITTED = REPOSITORY / "outputs" / "demo", Path(__file__).parent / "records" / "demo.json"
MARGIN_NATS = {"gpt": 1.0, "bert": 0.4}  # that a model must gain on the unigram; BERT can gain 0.32 without context
EXPECTED_TIME = "4 to 6 minutes on two idle cores of an AMD EPYC, 10 on those of a 2.8 GHz Xeon (Ice Lake)"
TERM = {"gpt": "loss", "bert": "lm_loss"}
TITLES = {"gpt": "GPT, 2 layers x 128, next token", "bert": "BERT, 2 layers x 128, masked token"}
MEANING = {
    "before": "untrained weights",
    "unigram": "token frequencies of the training text, no context, on the scored tokens (a run's last lines: on all)",
    "bigram": "Kneser-Ney, the token before",
    "trigram": "Kneser-Ney, the two tokens before",
    "context-free": "the best from the scored position alone, which one time in ten shows the token",
    "after": "the trained model",
}


def train(model: str) -> Path:
    """Pretrain the demo's `gpt` or `bert` on two tensor-parallel CPU ranks; returns its run folder."""
    run_dir = OUTPUT / f"{model}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    overrides = [f"experiment=demo_{model}", "parallel.tp_size=2", "trainer.accelerator=cpu"]
    print(f"$ python src/train.py {' '.join(overrides)}", flush=True)
    run_python("src/train.py", *overrides, f"hydra.run.dir={run_dir}", cwd=REPOSITORY)
    return run_dir


def measure(model: str, run_dir: Path) -> dict[str, float]:
    """Losses of a run in nats per token: before and after training, and of n-gram models on the tokens that it scored.

    The n-gram models count the whole training part. For GPT also bits per byte of the scored text.
    """
    record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))["metrics"]
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    data, tokenizer = build(DataConfig, config["data"], "data."), TokenizerConfig(**config["tokenizer"])
    corpus = prepare_corpus(data, tokenizer, model, None)
    train_part, held_out = (
        corpus.make_samples(corpus, s, corpus.parts[s][0], data, 0) for s in ("train", "validation")
    )
    (part,) = corpus.parts["train"]
    start, end = train_part.dataset.document_starts(np.array([part.first, part.last])).tolist()
    text = train_part.dataset.tokens[start:end].astype(np.int64)
    number = config["trainer"]["num_validation_samples"]
    samples = held_out.batch(np.zeros(number, dtype=np.int64), np.arange(number))
    is_scored = samples["labels"] != IGNORE_LABEL
    scored = samples["labels"][is_scored]
    found = {"before": record[f"val_start/{TERM[model]}"]["value"]}
    found["unigram"] = unigram_cross_entropy(text, scored, corpus.vocab_size)
    if model == "gpt":
        ids = np.concatenate([samples["tokens"][0, :1], scored])  # the windows follow each other
        for order, name in ((2, "bigram"), (3, "trigram")):
            found[name] = float(kneser_ney_losses(text, ids, corpus.vocab_size, order)[1:].mean())
    else:
        inputs, mask = samples["tokens"][is_scored], held_out.special["[MASK]"]
        found["context-free"] = float(context_free_losses(text, inputs, scored, mask, corpus.vocab_size).mean())
    found["after"] = record[f"val/{TERM[model]}"]["value"]
    if model == "gpt":
        num_bytes = len(corpus.load_tokenizer().decode(scored.tolist()).replace(END_OF_TEXT, "").encode())
        bits = len(scored) / num_bytes / math.log(2)
        found |= {f"{name}/bits_per_byte": found[name] * bits for name in ("unigram", "bigram", "trigram", "after")}
    return found


def draw(run_dirs: dict[str, Path], measured: dict[str, dict[str, float]], path: Path) -> None:
    """Draw training and validation loss of each run, with the n-gram models as references."""
    gains = (measured[model]["unigram"] - measured[model]["after"] for model in measured)
    with house_style():
        figure = page_figure("GPT ends {:.2f} nats below a unigram, BERT {:.2f}".format(*gains), 3.4)
        for axis, (model, run_dir) in zip(figure.subplots(1, 2), run_dirs.items(), strict=True):
            curve, found = read_curve(model, run_dir), measured[model]
            axis.plot(curve["step"], curve["train"], color=BLUE, alpha=0.35, linewidth=0.8, label="training")
            scored = curve.dropna(subset=["val"])
            axis.plot(scored["step"], scored["val"], color=BLUE, marker="o", markersize=4, label="validation")
            last, ends = curve["step"].iloc[-1], {}
            for name in ("unigram", "bigram", "trigram", "context-free"):
                if name in found:
                    axis.axhline(found[name], color=GREY, linewidth=0.9, linestyle=":")
                    ends[name] = last, found[name], GREY
            label_ends(axis, ends | {"model": (last, found["after"], BLUE)})
            axis.set(title=TITLES[model], xlabel="optimizer step", ylabel="loss, nats per token", xlim=(0, last))
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path)


def summarize(measured: dict[str, dict[str, float]]) -> str:
    """A table per model: each loss, what the committed record has, and what it means."""
    expected = json.loads(COMMITTED.read_text(encoding="utf-8"))["metrics"]
    lines = []
    for model, found in measured.items():
        lines += ["", f"{TITLES[model]}: validation loss in nats per token, lower is better"]
        lines += [f"{'':10}{'now':>8}{'expected':>10}"]
        for name in (name for name in MEANING if name in found):
            entry, bits = expected.get(f"{model}/{name}"), found.get(f"{name}/bits_per_byte")
            recorded = f"{entry['value']:10.3f}" if entry else f"{'':10}"
            also = f", {bits:.2f} bits per byte" if bits else ""
            lines.append(f"{name:10}{found[name]:8.3f}{recorded}  {MEANING[name]}{also}")
        gain = found["unigram"] - found["after"]
        state = "has learned" if gain >= MARGIN_NATS[model] else "HAS NOT LEARNED ENOUGH"
        lines.append(f"It {state}: {gain:.3f} nats below the unigram (required: {MARGIN_NATS[model]}).")
        if "context-free" in found:
            below = found["context-free"] - found["after"]
            shown = f"It uses other positions: {below:.3f} nats below context-free."
            not_shown = "It is not below context-free, so this does not show that it uses other positions."
            lines.append(shown if below > 0 else not_shown)
    return "\n".join(lines)


def read_curve(model: str, run_dir: Path) -> pd.DataFrame:
    """Training and validation loss, and throughput, by step: columns step, train, val and tokens_per_s."""
    table = pd.read_csv(run_dir / "metrics.csv")
    train = f"train/{TERM[model]}" if f"train/{TERM[model]}" in table else "train/loss"
    names = {"step": "step", train: "train", f"val/{TERM[model]}": "val", "tokens_per_s": "tokens_per_s"}
    return table[list(names)].rename(columns=names)


def record_losses(run_dirs: dict[str, Path], measured: dict[str, dict[str, float]], seconds: float, path: Path) -> None:
    """Write one record of both runs' losses and curves."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    metrics = {"time": {"value": seconds, "unit": "s"}}
    metrics["cpu_time"] = {"value": used.ru_utime + used.ru_stime, "unit": "s"}  # of the ranks, whatever else runs
    for model, found in measured.items():
        for name, value in found.items():
            unit = "bits/byte" if name.endswith("bits_per_byte") else "nats/token"
            metrics[f"{model}/{name}"] = {"value": value, "unit": unit}
    tables = {model: read_curve(model, run_dir) for model, run_dir in run_dirs.items()}
    curves = {model: table.dropna().round(4).to_dict("records") for model, table in tables.items()}  # as validated
    config, layout = {"titles": TITLES, "curves": curves}, {"tp_size": 2, "dp_size": 1}
    write_record(new_record("demo", "scaled_down", config, 1234, metrics, layout=layout), path)


def main() -> int:
    """Train both models, print initial and final losses, and check the required improvement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, help="path of a record of both runs; none by default")
    options = parser.parse_args()
    print(f"This trains a GPT and a BERT, each on two tensor-parallel ranks: {EXPECTED_TIME}.", flush=True)
    start = time.monotonic()
    run_dirs = {model: train(model) for model in MARGIN_NATS}
    measured = {model: measure(model, run_dir) for model, run_dir in run_dirs.items()}
    picture = OUTPUT / "loss_curves.png"
    draw(run_dirs, measured, picture)
    seconds = time.monotonic() - start
    print(summarize(measured))
    if options.record:
        record_losses(run_dirs, measured, seconds, options.record)
    folders = [str(run_dir.relative_to(REPOSITORY)) for run_dir in run_dirs.values()]
    print(
        f"\nloss curves  {picture.relative_to(REPOSITORY)}\nrun folders  {', '.join(folders)}\n"
        f"time         {seconds:.0f} s\n"
        f"next         .venv/bin/python src/generate.py ckpt={folders[0]} \\\n"
        '                 prompt="The function returns" max_new_tokens=48\n'
        "             .venv/bin/python src/train.py model=gpt_tiny trainer.max_steps=1000    # a run of your own"
    )
    learned = (found["unigram"] - found["after"] >= MARGIN_NATS[model] for model, found in measured.items())
    return 0 if all(learned) else 1


if __name__ == "__main__":
    sys.exit(main())
