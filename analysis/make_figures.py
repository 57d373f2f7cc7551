"""Every figure that the committed records give, as files: `make figures`.

    python analysis/make_figures.py                 # outputs/figures/

Figures 1 and 5, the paper's bars beside the cost model's; Figure 6 in small from `analysis/model_size.py`; Figure 7 as
a controlled experiment from `analysis/norm_order.py`. To add one, give `figures` its name, caption and drawing.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files, no window

from matplotlib.figure import Figure

from lmscale.from_plain import build
from lmscale.perf.cluster import Cluster
from lmscale.report import norm_order
from lmscale.report.figures.model_size import draw_laws, draw_model_sizes
from lmscale.report.figures.norm_order import draw_gradient_norms, draw_loss_curves, draw_rates
from lmscale.report.figures.scaling import draw_figure_1, draw_figure_5
from lmscale.report.scaling_figures import figure_1_rows, figure_5_rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "analysis" / "results"


def fitted_cluster(record: Path = RESULTS / "cost_model.json") -> Cluster:
    """The anchored cluster of a cost-model record."""
    values = json.loads(record.read_text(encoding="utf-8"))["config"]["cluster"]
    return build(Cluster, values, "cluster.")


def figures(results: Path) -> dict[str, tuple[str, Figure]]:
    """Name: caption and drawing of every figure for which a folder of records has what it needs."""
    cluster = fitted_cluster(results / "cost_model.json")
    found = {
        "figure_1": (
            "Figure 1. Sustained PFLOP/s, the paper's and the cost model's",
            draw_figure_1(figure_1_rows(cluster)),
        ),
        "figure_5": (
            "Figure 5. Weak scaling, the paper's bars and the cost model's",
            draw_figure_5(figure_5_rows(cluster)),
        ),
    }
    if (results / "model_size.json").is_file():
        record = json.loads((results / "model_size.json").read_text(encoding="utf-8"))
        found |= {
            "model_size": (
                "Figure 6 in small, scaled down. Validation perplexity of GPTs of six sizes, mean of the seeds",
                draw_model_sizes(record),
            ),
            "model_size_laws": (
                "Loss against size, scaled down. Bars span the seeds; lines are power laws with the 95 % interval of b",
                draw_laws(record),
            ),
        }
    if (results / "norm_order.json").is_file():
        factorial = json.loads((results / "norm_order.json").read_text(encoding="utf-8"))["config"]["factorial"]
        folder = results / "norm_order"
        cells = norm_order.read_cells(folder)
        curves, norms = norm_order.read_curves(folder), norm_order.read_gradient_norms(folder)
        of = "Figure 7 as a controlled experiment, scaled down."
        found |= {
            "norm_order_curves": (
                f"{of} Training loss by depth; dotted: the least loss without a look at other tokens",
                draw_loss_curves(curves, cells, factorial),
            ),
            "norm_order_rates": (
                f"{of} Last training loss over the learning rate",
                draw_rates(cells, factorial),
            ),
            "norm_order_gradients": (
                f"{of} Gradient norm of each layer before the first step",
                draw_gradient_norms(norms, cells, factorial),
            ),
        }
    return found


def draw_all(results: Path, folder: Path, suffix: str = "png") -> dict[Path, str]:
    """Draw every figure of a folder of records, in the format of `suffix`; returns the files and what each shows."""
    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for name, (caption, figure) in figures(results).items():
        path = folder / f"{name}.{suffix}"
        figure.savefig(path, dpi=200, bbox_inches="tight")
        captions[path] = caption
    return captions


def main() -> int:
    """Draw all and say what each shows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder of records")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "figures")
    options = parser.parse_args()
    for path, caption in draw_all(options.records, options.folder).items():
        print(f"{path}: {caption}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
