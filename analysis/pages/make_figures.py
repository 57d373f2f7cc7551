"""Draw every figure from the committed records: `make figures`.

    python analysis/pages/make_figures.py                 # outputs/figures/, whose README.md has findings and captions
    python analysis/pages/make_figures.py --only norm_order_curves --folder analysis/figures    # the README's

Figures 1 and 5 with the paper's and the cost model's bars; the scaling study (`analysis/scaling_law/`); Figure 7 as a
controlled experiment (`analysis/norm_order/`); the miniature (`analysis/miniature/`); Table 5, scaled down. To add a
figure, add its name, caption and drawing to `figures`.
"""

import argparse
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import matplotlib

matplotlib.use("Agg")  # no display is needed

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.coordinate_check.figure import draw_powers
from analysis.finetuning.figure import draw_small_runs
from analysis.finetuning.table import small_runs
from analysis.miniature.figure import study_figures as miniature_figures
from analysis.norm_order.cells import read_cells, read_curves
from analysis.norm_order.figure import (
    draw_final_losses,
    draw_loss_curves,
    draw_mechanism,
    draw_paired_losses,
    draw_true_widths,
)
from analysis.norm_order.limits import study_cells
from analysis.pages.results_page import findings
from analysis.report.records import ANALYSIS, by_id, fitted_cluster, read_records, records_below
from analysis.report.style import DPI
from analysis.scaling.figures import draw_figure_1, draw_figure_5, draw_memory_wall, draw_parts
from analysis.scaling.sizes import DEVICES, memory_table, parameter_table
from analysis.scaling.tables import figure_1_rows, figure_5_rows
from analysis.scaling_law.cells import tabulate
from analysis.scaling_law.figure import study_figures
from lmscale.cli.errors import one_line_errors
from lmscale.results import path_argument


def figures(records: dict[str, dict]) -> dict[str, tuple[str, Figure]]:
    """Caption and drawing of every figure by name; that of the true widths once a record of them is there."""
    cluster = fitted_cluster(records["cost_model.json"])
    runs = tabulate({name: record for name, record in records.items() if name.startswith("scaling_law/")})
    first, factorial = records_below(records, "norm_order"), records["norm_order.json"]["config"]["factorial"]
    cells = read_cells(first)
    study, outcome = study_cells(records_below(records, "study")), records["norm_order_study.json"]
    of_first, of_second = "Figure 7 as a controlled experiment, scaled down.", "Layer-norm placement, second study."
    references = "dotted: unigram entropy; dashed: lowest loss possible without context"
    found = {
        "parameters": ("Parameters of the paper's models by part", draw_parts(parameter_table())),
        "memory_wall": (
            "Predicted memory per rank of the study's models, and what devices offer for tensors",
            draw_memory_wall(memory_table(), DEVICES),
        ),
        "figure_1": (
            "Figure 1. Sustained FLOP/s of the paper and of the cost model. "
            "The paper's bars from 2 to 256 GPUs are its Figure 5 x 39 TFLOP/s",
            draw_figure_1(figure_1_rows(cluster)),
        ),
        "figure_5": (
            "Figure 5. Weak scaling of the paper and of the cost model",
            draw_figure_5(figure_5_rows(cluster)),
        ),
        **{f"scaling_law_{name}": each for name, each in study_figures(runs).items()},
        **{f"miniature_{name}": each for name, each in miniature_figures(by_id(records, "miniature")).items()},
        "downstream": (
            "Table 5, scaled down. A small BERT from published and from random weights, one point per seed",
            draw_small_runs(small_runs(records)),
        ),
        "coordinate_check": (
            "Coordinate checks: the power of the size by which each part's move changes; the band passes",
            draw_powers(records_below(records, "coordinate_check")),
        ),
        "norm_order_curves": (
            f"{of_first} Training loss (means of 25 steps) by initialization and depth, one line per seed, each "
            f"placement and initialization at its best rate at {factorial} layers; {references}",
            draw_loss_curves(read_curves(first), cells, factorial),
        ),
        "placement_rates": (
            f"{of_second} Final training loss over learning rate by depth, one mark per seed; "
            "lines join the means of the rates at which both seeds learned",
            draw_final_losses(study, outcome),
        ),
        "placement_losses": (
            f"{of_second} Final training loss of eight seeds, each placement at its own rate",
            draw_paired_losses(study, outcome),
        ),
        "placement_mechanism": (
            f"{of_second} The rule's statistic at step 100, and its threshold",
            draw_mechanism(study, outcome),
        ),
    }
    if wide := [record for record in records.values() if record["name"] == "norm_order_true_widths"]:
        found["norm_order_true_widths"] = (
            f"Figure 7 at its true widths, 2,000 steps. Training loss of BERT 336M and 752M; {references}",
            draw_true_widths(read_curves(wide), read_cells(wide)),
        )
    return found


def draw_all(records: dict[str, dict], folder: Path, only: str | None = None) -> dict[Path, str]:
    """Draw every figure, or `only` one, into a folder; returns captions by file.

    The metadata of each file holds the fingerprint of the figure under `Source`.

    Raises:
        ValueError: there is no figure called `only`.
    """
    drawn = figures(records)
    if only is not None and only not in drawn:
        raise ValueError(f"`--only` must be one of {', '.join(drawn)}, but is {only}")
    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for name, (caption, figure) in drawn.items():
        if only in (None, name):
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=DPI, metadata={"Source": fingerprint(figure)})
            captions[path] = caption
    return captions


def findings_page(records: dict[str, dict], captions: dict[Path, str]) -> str:
    """A page of Markdown: the findings with the figure of each, then the other figures."""
    figures = {path.stem: f"![{path.stem}]({path.name})\n\n*{caption}.*" for path, caption in captions.items()}
    parts = ["# Findings and figures", "Drawn by `make figures` from the committed records."]
    for each in findings(records):
        parts += [f"## {each['title']}", f"{each['text']} ({each['records']})"]
        parts += [figures.pop(each["figure"])] if each["figure"] in figures else []
    return "\n\n".join([*parts, "## Other figures", *figures.values()]) + "\n"


def fingerprint(figure: Figure) -> str:
    """Digest of the lines, bars, points and text of a figure, the same on every machine."""
    seen = [figure.get_suptitle()]
    for axis in figure.axes:
        seen += [axis.get_title(), axis.get_xlabel(), axis.get_ylabel()]
        drawn = [line.get_xydata() for line in axis.lines]
        drawn += [patch.get_bbox().get_points() for patch in axis.patches if isinstance(patch, Rectangle)]
        drawn += [points.get_offsets() for points in axis.collections]
        seen += [" ".join(f"{value:.5g}" for value in np.asarray(part).ravel()) for part in drawn]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()


@one_line_errors()
def main() -> int:
    """Draw the figures, and without `--only` write the page that shows them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=path_argument, default=ANALYSIS.parent / "outputs" / "figures")
    parser.add_argument("--only", metavar="NAME", help="one figure")
    options = parser.parse_args()
    records = read_records()
    captions = draw_all(records, options.folder, options.only)
    if options.only is None:
        (options.folder / "README.md").write_text(findings_page(records, captions), encoding="utf-8")
    for path, caption in captions.items():
        print(f"{path}: {caption}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
