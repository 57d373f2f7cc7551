"""Combine finetuned models of one task: `python finetune/ensemble.py RUN RUN RUN RUN RUN --out FOLDER`.

The members are run folders of `finetune/run.py` that scored the same sets. The output folder contains `<set>/` with
predictions in the benchmark's format, and `record.json`.
"""

import argparse
import sys
from pathlib import Path

from lmscale.cli.errors import one_line_errors
from lmscale.finetune.ensembling import ensemble
from lmscale.finetune.scoring import with_units
from lmscale.results import existing_path, new_record, path_argument, read_record, write_record

NAME = "finetune_ensemble"


def refuse_run_folder(out: Path) -> None:
    """Refuse a run folder; an ensemble's own folder may be overwritten."""
    if read_about(out).get("name", NAME) != NAME or any((out / name).exists() for name in ("config.json", ".lock")):
        raise ValueError(f"`--out` must be a folder without a run, but {out} has one")


def read_about(run: Path) -> dict:
    """Read the record of a folder; empty if it has none."""
    path = run / "record.json"
    return read_record(path) if path.exists() else {}


def evidence(runs: list[Path]) -> tuple[str, str | None]:
    """Kind of evidence of the members' records: the paper's runs of one size, or scaled-down ones."""
    about = set()
    for run in runs:
        record = read_about(run)
        about.add((record.get("kind", "scaled_down"), record.get("config", {}).get("paper_size")))
    kinds, sizes = {kind for kind, _ in about}, {size for _, size in about}
    size = sizes.pop() if len(sizes) == 1 else None
    return ("run" if kinds == {"run"} and size else "scaled_down"), (f"{size} ensemble" if size else None)


@one_line_errors()
def main() -> int:
    """Combine the members, score the ensemble and write the outputs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=existing_path, help="run folders")
    parser.add_argument("--out", type=path_argument, required=True, help="folder for predictions and record")
    options = parser.parse_args()
    refuse_run_folder(options.out)
    kind, paper_size = evidence(options.runs)
    metrics, alarms = ensemble(options.runs, options.out)
    members = {"members": [str(run) for run in options.runs], "paper_size": paper_size, "alarms": alarms}
    record = new_record(NAME, kind, config=members, seed=None, metrics=with_units(metrics), device="cpu")
    write_record(record, options.out / "record.json")
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")
    for alarm in alarms:
        print(f"WARNING: {alarm}")
    print(f"record: {options.out / 'record.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
