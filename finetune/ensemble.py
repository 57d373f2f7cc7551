"""Combine finetunings of one task: `python finetune/ensemble.py RUN RUN RUN RUN RUN --out FOLDER`.

The members are run folders of `finetune/run.py` that scored the same sets. The folder gets `<set>/` with predictions in
the benchmark's form, and `record.json`.
"""

import argparse
import sys
from pathlib import Path

from lmscale.finetune.ensembling import ensemble
from lmscale.results import new_record, write_record


def main() -> int:
    """Read, combine, score, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, required=True, help="folder for predictions and record")
    options = parser.parse_args()
    try:
        metrics = ensemble(options.runs, options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = {
        name: {"value": value, "unit": "logits" if name.endswith("null_threshold") else "%"}
        for name, value in metrics.items()
    }
    members = {"members": [str(run) for run in options.runs]}
    record = new_record("finetune_ensemble", "run", config=members, seed=None, metrics=figures, device="cpu")
    write_record(record, options.out / "record.json")
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")
    print(f"record: {options.out / 'record.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
