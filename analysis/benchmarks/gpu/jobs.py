"""Finetuning, zero-shot evaluation and text on a GPU, compared with a CPU, from checkpoints saved in the background.

    python analysis/benchmarks/gpu/jobs.py --folder outputs/jobs --record FILE

A tiny GPT and a tiny BERT train on the device, with checkpoints saved in the background and again without. From the
former each job runs on the device and on the CPU, in fp64 and without dropout. Exit code 1: the results of a job or the
weights of two checkpoints differ; 2: a job failed.
"""

import argparse
import csv
import json
import shutil
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `analysis`, which is not installed

from safetensors.torch import load_file

from analysis.benchmarks.gpu.device import require_device
from analysis.running import ROOT, run_python
from lmscale.cli.errors import one_line_errors
from lmscale.results import new_record, path_argument, record_argument, report

BOUND = 1e-6  # relative, in fp64: sums in another order, which Adam's division magnifies
LENGTH, NUM_STEPS = 32, 20
EXACT = "precision=fp64"
TABLE = "finetune/example_qqp.tsv"
TRAIN = [
    *(f"model.max_position_embeddings={LENGTH}", f"data.seq_length={LENGTH}", f"trainer.max_steps={NUM_STEPS}"),
    *("trainer.num_validation_samples=8", "trainer.progress_bar=false", "schedule.warmup_steps=2"),
    *("checkpoint.save_every_steps=5", "checkpoint.keep_last=null"),
    *("logger.tensorboard=false", EXACT),
]
FINETUNE = ["task=qqp", f"task.train={TABLE}", f"task.validation.dev={TABLE}", f"task.max_seq_length={LENGTH}"]
FINETUNE += ["trainer.num_epochs=2", "hidden_dropout=0", "attention_dropout=0"]
FINETUNE += ["global_batch_size=4", "micro_batch_size=4"]
ZERO_SHOT = ["task=wikitext103", "task.path=LICENSE", f"task.window={LENGTH}", "task.stride=16"]
GENERATE = ["prompt=The ", "temperature=0", "max_new_tokens=16", "stream=false"]


def run_jobs(folder: Path, device: str) -> dict[str, list[float]]:
    """Every job on one device; returns its numbers."""
    gpt, bert, out = folder / "gpt", folder / "bert", folder / device
    text, where = out / "text.jsonl", f"accelerator={device}"
    run = partial(run_python, cwd=ROOT)
    run("finetune/run.py", f"ckpt={bert}", *FINETUNE, f"trainer.{where}", EXACT, f"hydra.run.dir={out / 'finetune'}")
    run("src/zero_shot.py", f"ckpt={gpt}", *ZERO_SHOT, where, EXACT, f"hydra.run.dir={out}")
    run("src/generate.py", f"ckpt={gpt}", *GENERATE, where, EXACT, f"out={text}")
    with open(out / "finetune" / "metrics.csv", encoding="utf-8", newline="") as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    metrics = json.loads((out / "record.json").read_text(encoding="utf-8"))["metrics"]
    tokens = json.loads(text.read_text(encoding="utf-8"))["tokens"]
    return {"finetune": losses, "zero_shot": [metrics["wikitext103/loss"]["value"]], "generate": tokens}


def norms_of_saves(run: Path) -> list[float]:
    """The norm of every tensor in the checkpoints of a run, in one order."""
    files = sorted((run / "checkpoints").glob("step_*.ckpt/*.safetensors"))
    return [tensor.double().norm().item() for file in files for _, tensor in sorted(load_file(file).items())]


def largest_gap(found: list[float], expected: list[float]) -> float:
    """Largest relative gap of two lists; infinite if one is empty or longer."""
    if not found or len(found) != len(expected):
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(found, expected, strict=True))


@one_line_errors()
def main() -> int:
    """Run all jobs twice, print the gaps and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=path_argument, required=True, help="of the runs; it is emptied first")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--record", type=record_argument, required=True)
    options = parser.parse_args()
    folder, device = options.folder.absolute(), options.accelerator
    _, name = require_device(device)
    shutil.rmtree(folder, ignore_errors=True)
    for family in ("gpt", "bert"):
        for run, background in ((family, "true"), (f"{family}_foreground", "false")):
            where = [f"trainer.accelerator={device}", f"hydra.run.dir={folder / run}", f"checkpoint.async={background}"]
            run_python("src/train.py", f"model={family}_tiny", *TRAIN, *where, cwd=ROOT)
    found = run_jobs(folder, device)
    shutil.move(folder / device, folder / "device")  # a rehearsal's device is a CPU too
    expected = run_jobs(folder, "cpu")
    saved = [len(list((folder / family / "checkpoints").glob("step_*.ckpt"))) for family in ("gpt", "bert")]
    for family in ("gpt", "bert"):
        found[f"save_{family}"] = norms_of_saves(folder / family)
        expected[f"save_{family}"] = norms_of_saves(folder / f"{family}_foreground")
    gaps = {job: largest_gap(found[job], expected[job]) for job in found}
    units = {
        job: "relative to a save in the foreground" if job.startswith("save") else "relative to a CPU" for job in gaps
    }
    metrics = {f"{job}/gap": {"value": gap, "unit": units[job]} for job, gap in gaps.items()}
    metrics["background_saves"] = {"value": min(saved), "unit": "checkpoints"}
    record = new_record("gpu_jobs", "run", {"bound": BOUND}, None, metrics, device=name)
    bad = [job for job, gap in gaps.items() if not gap <= BOUND]
    if bad or min(saved) != NUM_STEPS // 5:
        report(record)
        print(f"error: these differ by more than {BOUND:g}: {', '.join(bad) or 'none'}; saved {saved}", file=sys.stderr)
        return 1
    report(record, options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
