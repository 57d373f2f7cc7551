"""Figure files: each stores a fingerprint of its data, and the README's figure shows the committed records."""

from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import warm
from entry_points import environment
from PIL import Image

from analysis.pages import make_figures
from analysis.report.records import read_records

ROOT = Path(__file__).resolve().parents[2]
SHOWN = {"norm_order_curves": "README.md", "coordinate_check": "docs/guides/learning_rate.md"}


@pytest.mark.parametrize("name", SHOWN)
def test_the_figure_of_a_page_shows_the_committed_records(name: str) -> None:
    _, figure = make_figures.figures(read_records())[name]
    file = ROOT / "analysis" / "figures" / f"{name}.png"
    assert Image.open(file).text["Source"] == make_figures.fingerprint(figure)
    assert f"analysis/figures/{file.name})" in (ROOT / SHOWN[name]).read_text(encoding="utf-8")


def test_a_fingerprint_covers_data_and_text() -> None:
    def drawn(loss: float, label: str):
        figure, axis = plt.subplots()
        axis.plot([0, 1], [5.0, loss])
        axis.set_ylabel(label)
        plt.close(figure)
        return make_figures.fingerprint(figure)

    assert drawn(4.0, "nats") == drawn(4.0 + 1e-9, "nats")
    assert len({drawn(4.0, "nats"), drawn(4.01, "nats"), drawn(4.0, "bits")}) == 3


def test_no_title_is_wider_than_its_figure() -> None:
    """The file would cut it off."""
    for name, (_, figure) in make_figures.figures(read_records()).items():
        figure.canvas.draw()
        title = figure._suptitle.get_window_extent()
        assert title.x0 >= 0 and title.x1 <= figure.bbox.width, name


@pytest.mark.slow
def test_one_figure_alone_is_drawn_and_an_unknown_one_refused(tmp_path) -> None:
    captions = make_figures.draw_all(read_records(), tmp_path / "one", only="figure_5")
    assert [path.name for path in captions] == ["figure_5.png"] == [path.name for path in (tmp_path / "one").iterdir()]
    script = str(ROOT / "analysis" / "pages" / "make_figures.py")
    done = warm.run([script, "--only", "figure_9"], ROOT, environment(), timeout=200)
    assert done.returncode == 2 and done.stderr.startswith("error: `--only` must be one of parameters,")
