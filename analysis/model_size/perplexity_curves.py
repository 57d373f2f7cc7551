"""Figure 6: validation perplexity over the steps of any runs, one curve per run folder.

    python analysis/model_size/perplexity_curves.py outputs/gpt_355m/RUN outputs/gpt_2.5b/RUN --labels "355 M" "2.5 B"

Reads `metrics.csv` and `config.json` of every folder. Curves differ in
marker, dash pattern and lightness, so they are distinguishable in grayscale. A record is written beside the figure: the
hash of each file, the number of points and the best perplexity.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd
from matplotlib.figure import Figure

from analysis.model_size.perplexity import AXES, draw_perplexity
from lmscale.paper import GPT_SIZES, STEPS
from lmscale.results import new_record, write_record

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Curve:
    """The validation curve of one run folder.

    Args:
        label: name of the curve in the legend.
        points: columns `steps`, `tokens` (seen in training) and `perplexity`, one row per validation.
        sha256: hash of metrics.csv.
        architecture: `bert` or `gpt`.
        shape: layers, hidden size and attention heads.
        text: settings of data and tokenizer.
    """

    label: str
    points: pd.DataFrame
    sha256: str
    architecture: str
    shape: tuple[int, int, int]
    text: dict[str, dict]


def read_curve(folder: Path, label: str | None = None) -> Curve:
    """Read the validation perplexities of a run.

    Args:
        label: name of the curve; None uses the run's name and the size of its model.

    Raises:
        ValueError: the folder is not a run folder, or the run was never validated.
    """
    try:
        data = (folder / "metrics.csv").read_bytes()
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        table = pd.read_csv(folder / "metrics.csv")
        points = table[["step", "val/perplexity"]].astype(float).dropna()
        points.columns = ["steps", "perplexity"]
        points["tokens"] = points["steps"] * (config["global_batch_size"] * config["data"]["seq_length"])
        model, text = config["model"], {key: config[key] for key in ("data", "tokenizer")}
        architecture = str(model["architecture"])
        shape = model["num_layers"], model["hidden_size"], model["num_attention_heads"]
        name = f"{config['name']}, {shape[0]} x {shape[1]}"
    except OSError as error:
        raise ValueError(f"a run must be a run folder, but {folder} has no {Path(error.filename).name}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a run must be a run folder, but {folder} cannot be read as one ({error!r})") from None
    if points.empty:
        raise ValueError(f"a run must have been validated, but metrics.csv of {folder} has no val/perplexity")
    points, sha256 = points.reset_index(drop=True), hashlib.sha256(data).hexdigest()
    return Curve(label or name, points, sha256, architecture, shape, text)


def check_together(curves: list[Curve]) -> str | None:
    """Return a warning if the perplexities of the curves may not be comparable, else None.

    Raises:
        ValueError: a label occurs twice, or BERT and GPT are mixed, whose perplexities measure different things.
    """
    labels = [curve.label for curve in curves]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"`--labels` must name every run differently, but {twice!r} occurs twice")
    kinds = {curve.architecture for curve in curves}
    if len(kinds) > 1:
        raise ValueError(f"the runs must be of one architecture, but are of {' and '.join(sorted(kinds))}")
    same = {
        name: len({json.dumps(curve.text[name], sort_keys=True) for curve in curves}) == 1
        for name in ("data", "tokenizer")
    }
    different = [name for name, is_same in same.items() if not is_same]
    return (
        f"the runs differ in `{'` and `'.join(different)}`: their perplexities may not be comparable"
        if different
        else None
    )


def make_record(folders: list[Path], curves: list[Curve], x: str) -> dict:
    """Build the record: the files read and the best perplexity of each curve."""
    metrics = {}
    for curve in curves:
        best = float(curve.points["perplexity"].min())
        metrics[f"{curve.label}/best_perplexity"] = {"value": best, "unit": "perplexity"}
        metrics[f"{curve.label}/points"] = {"value": len(curve.points), "unit": "count"}
    read = [
        {"label": curve.label, "folder": str(folder), "metrics_sha256": curve.sha256, "points": len(curve.points)}
        for folder, curve in zip(folders, curves, strict=True)
    ]
    kind = "run" if all(is_papers(curve) for curve in curves) else "scaled_down"
    return new_record("perplexity_curves", kind, {"x": x, "runs": read}, None, metrics)


def is_papers(curve: Curve) -> bool:
    """Whether the model and the number of steps are those of a curve in Figure 6."""
    return curve.shape in GPT_SIZES.values() and curve.points["steps"].max() == STEPS


def main() -> int:
    """Read the runs, draw the curves and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--labels", nargs="+", help="labels of the curves, in the order of the runs")
    parser.add_argument("--x", choices=AXES, default="steps")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "figures" / "figure_6.png")
    options = parser.parse_args()
    labels = options.labels or [None] * len(options.runs)
    try:
        if len(labels) != len(options.runs):
            raise ValueError(
                f"the number of `--labels` must equal the number of runs ({len(options.runs)}), but is {len(labels)}"
            )
        known = sorted(Figure().canvas.get_supported_filetypes())
        if options.output.suffix[1:] not in known:
            raise ValueError(f"`--output` must end in one of {', '.join(known)}, but is {options.output}")
        curves = [read_curve(folder, label) for folder, label in zip(options.runs, labels, strict=True)]
        warning = check_together(curves)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        draw_perplexity({c.label: c.points for c in curves}, options.x).savefig(options.output)
    except OSError as error:
        print(f"error: `--output` must be a file that can be written, but {error}", file=sys.stderr)
        return 2
    record = make_record(options.runs, curves, options.x)
    write_record(record, options.output.with_suffix(".json"))
    print(*(f"{name} = {entry['value']:.6g} {entry['unit']}" for name, entry in record["metrics"].items()), sep="\n")
    print(f"figure: {options.output}\nrecord: {options.output.with_suffix('.json')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
