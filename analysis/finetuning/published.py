"""Publish the models that `small.py` has saved, and compare transformers' outputs with the runs' own, row by row.

    python analysis/finetuning/published.py outputs/finetune_small

Each model is exported by `src/convert.py`, loaded by transformers alone with its tokenizer, and applied to the first
rows of the set that its run has scored.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np
import torch
import transformers

from analysis.finetuning.inputs import RECORDS
from analysis.finetuning.small import SEEDS, run_script
from lmscale.cli.errors import one_line_errors
from lmscale.config.finetune import GLUE
from lmscale.finetune.outputs import read_outputs
from lmscale.finetune.pairs import clean_text
from lmscale.finetune.tasks import read_examples
from lmscale.results import existing_path, new_record, record_argument, report


def compare(run: Path, folder: Path, num_rows: int) -> tuple[float, int]:
    """The largest difference of an output, and the number of rows that are predicted as by the run.

    Rows whose first text fills the whole input are left out: transformers cannot cut the second one alone then.
    """
    outputs = read_outputs(min((run / "predictions").iterdir()))
    task, tokenizer = outputs.task, transformers.AutoTokenizer.from_pretrained(folder)
    rows = read_examples(task, next(iter(task.validation.values())))[0]
    fits = [len(tokenizer(clean_text(row.first)).input_ids) + 1 < task.max_seq_length for row in rows]
    kept = [number for number, fit in enumerate(fits) if fit][:num_rows]
    rows, ours = [rows[number] for number in kept], torch.from_numpy(np.stack([outputs.logits[n] for n in kept]))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = [[clean_text(row.first) for row in rows]]
    texts += [[clean_text(row.second) for row in rows]] if rows[0].second is not None else []
    cut = "only_second" if len(texts) == 2 else True
    inputs = tokenizer(*texts, truncation=cut, max_length=task.max_seq_length, padding=True, return_tensors="pt")
    with torch.inference_mode():
        theirs = model(**inputs).logits
    alike = (theirs - ours).abs() < 1e-4 if task.labels is None else theirs.argmax(1) == ours.argmax(1)
    return (theirs - ours).abs().max().item(), int(alike.sum())


@one_line_errors()
def main() -> int:
    """Export and compare every saved model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=existing_path, help="`--outputs` of small.py")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--record", type=record_argument, default=RECORDS / "finetune_published.json")
    options = parser.parse_args()
    metrics = {}
    for task in GLUE:
        run = options.folder.resolve() / f"{task}_pretrained_{SEEDS[0]}"
        if not (run / "checkpoints").is_dir():
            continue
        folder = run / "hugging_face"
        if not folder.is_dir():
            run_script("src/convert.py", f"source={run}", f"target={folder}", "format=hugging_face")
        difference, alike = compare(run, folder, options.rows)
        metrics[f"{task}/largest_difference"] = {"value": difference, "unit": "output"}
        metrics[f"{task}/predicted_alike"] = {"value": alike, "unit": "rows"}
    config = {"rows": options.rows, "model": "all-MiniLM-L6-v2, finetuned by small.py"}
    report(new_record("finetune_published", "scaled_down", config, SEEDS[0], metrics, device="cpu"), options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
