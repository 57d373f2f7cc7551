"""Figure 6: validation perplexity over the steps of any runs, one curve per run folder.

    python analysis/model_size/perplexity_curves.py outputs/gpt_355m/RUN outputs/gpt_2.5b/RUN --labels "355 M" "2.5 B"

Reads `metrics.csv` and `config.json` of every folder. Curves differ in marker, dash pattern and lightness, so they are
distinguishable in grayscale.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd
from matplotlib.figure import Figure

from analysis.model_size.figure import AXES, draw_perplexity

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Curve:
    """The validation curve of one run folder.

    Args:
        label: name of the curve in the legend.
        points: columns `steps`, `tokens` (seen in training) and `perplexity`, one row per validation.
        architecture: `bert` or `gpt`.
        text: settings of data and tokenizer.
    """

    label: str
    points: pd.DataFrame
    architecture: str
    text: dict[str, dict]


def read_curve(folder: Path, label: str | None = None) -> Curve:
    """Read the validation perplexities of a run.

    Args:
        label: name of the curve; None uses the run's name and the size of its model.

    Raises:
        ValueError: the folder is not a run folder, or the run was never validated.
    """
    try:
        points = pd.read_csv(folder / "metrics.csv")[["step", "val/perplexity"]].astype(float).dropna()
        points.columns = ["steps", "perplexity"]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        points["tokens"] = points["steps"] * (config["global_batch_size"] * config["data"]["seq_length"])
        model, text = config["model"], {key: config[key] for key in ("data", "tokenizer")}
        architecture = str(model["architecture"])
        name = f"{config['name']}, {model['num_layers']} x {model['hidden_size']}"
    except OSError as error:
        raise ValueError(f"a run must be a run folder, but {folder} has no {Path(error.filename).name}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a run must be a run folder, but {folder} cannot be read as one ({error!r})") from None
    if points.empty:
        raise ValueError(f"a run must have been validated, but metrics.csv of {folder} has no val/perplexity")
    return Curve(label or name, points.reset_index(drop=True), architecture, text)


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
    first = curves[0].text
    different = [name for name in first if any(curve.text[name] != first[name] for curve in curves)]
    return (
        f"the runs differ in `{'` and `'.join(different)}`: their perplexities may not be comparable"
        if different
        else None
    )


def main() -> int:
    """Read the runs and draw the curves."""
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
        if (warning := check_together(curves)) is not None:
            print(f"warning: {warning}", file=sys.stderr)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        draw_perplexity({c.label: c.points for c in curves}, options.x).savefig(options.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*(f"{curve.label}: lowest perplexity {curve.points['perplexity'].min():.6g}" for curve in curves), sep="\n")
    print(f"figure: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
