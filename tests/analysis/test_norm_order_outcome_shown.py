"""Tables and figures of the second norm-order study: what they say comes from its record, at every stage."""

import numpy as np
import pandas as pd
import pytest
from made_study import learns, make_cells, without

from analysis.norm_order import study_figure
from analysis.norm_order.outcome import summarize
from analysis.norm_order.outcome_table import limits_table, questions_table, table_of_tests
from analysis.report.style import PAGE_WIDTH

DRAWN = ("final_losses", "limits", "paired_losses", "mechanism", "recovery")


@pytest.fixture(scope="module")
def planted() -> pd.DataFrame:
    return make_cells()


@pytest.fixture(scope="module")
def outcome(planted) -> dict:
    return summarize(planted)


def draw(cells: pd.DataFrame) -> dict:
    record = summarize(cells)
    return {name: getattr(study_figure, f"draw_{name}")(cells, record) for name in DRAWN}


def test_the_tables_have_the_records_words(outcome) -> None:
    rows = table_of_tests(outcome).set_index("test")
    first = outcome["config"]["tests"][0]
    assert rows.loc["1", "effect, 95 %"] == f"{first['effect']:+.3f} [{first['low']:+.3f}, {first['high']:+.3f}]"
    assert rows.loc["8", "effect, 95 %"] == "1.00 [0.63, 1.00]" and rows.loc["8", "p"] == "0.0039"
    assert rows.loc["4", "decision"] == "not supported" and rows.loc["7", "unit"] == "log2 rate per log2 depth"
    found = questions_table(outcome).set_index(questions_table(outcome)["question"].str[0])["found"]
    assert "post-norm 1.00 [0.78, 1.22] at 6 to 48 layers (0.70 to 1.30 with" in found["1"]
    assert found["1"].endswith("(test 7): -1.000 [-1.281, -0.719] (supported).")
    assert f"At 12 layers: post-norm minus pre-norm {first['effect']:+.3f} [" in found["2"]
    assert found["3"].startswith("B2T: no at 12 layers, yes at 24 layers.")
    assert "(two seeds): trivially, as 100 steps do, at 12 layers, yes at 24 layers." in found["3"]
    assert "8 of the 8 pairs that differ (supported)" in found["4"]
    assert "constant_share/mlp above 0.6" in found["4"] and "(test 9: supported)" in found["4"]
    assert set(questions_table(outcome)["expectation refuted"]) == {"no"}
    assert limits_table(outcome).loc[("post-norm", 100)].tolist() == ["0.012", "0.006", "0.003", "0.0015"]


def test_without_runs_every_answer_is_not_run(planted) -> None:
    none = without(planted, planted["group"] != "")
    record = summarize(none)
    assert set(table_of_tests(record)["decision"]) == {"not run"} and set(table_of_tests(record)["p"]) == {""}
    questions = questions_table(record)
    assert set(questions["expectation refuted"]) == {"open"}
    assert all(
        ("not run" in found or "open" in found) and not any(c in found for c in "+%[") for found in questions["found"]
    )
    assert limits_table(record).empty and set(draw(none).values()) == {None}


def test_signs_are_told_as_a_share_of_pairs() -> None:
    record = summarize(make_cells(learns=lambda cell: learns(cell) and (cell.order, cell.seed) != ("post", 11)))
    assert "post-norm minus pre-norm lower in 7 of the 8 pairs that differ (" in questions_table(record)["found"][1]


def test_the_figures_show_every_cell_and_the_rules(planted) -> None:
    figures = draw(planted)
    assert all(figure.get_figwidth() == PAGE_WIDTH for figure in figures.values())
    rates, pairs = figures["final_losses"].axes, figures["paired_losses"].axes
    assert [axis.get_title() for axis in rates] == ["6 layers", "12 layers", "24 layers", "48 layers"]
    shown = sum(len(points.get_offsets()) for axis in rates for points in axis.collections)
    at_100 = planted["group"].isin(["selection", "six", "deep", "deep_pre", "deep_b2t"])
    assert shown == at_100.sum()
    title = "Rate limits at 48 layers: pre-norm 0.006, post-norm 0.0015, B2T learns at 0.003"
    assert figures["final_losses"].get_suptitle() == title
    seeds = planted[at_100 & (planted["layers"] == 12) & (planted["order"] == "post")].groupby("lr")["state"]
    both = [rate for rate, states in seeds if set(states) == {"learned"}]
    assert list(rates[1].lines[1].get_xdata()) == both and len(both) < len(seeds)  # no mean over a stuck run
    marks = [text.get_text() for text in figures["final_losses"].legends[0].get_texts()]
    assert marks == ["pre-norm", "post-norm", "B2T", "learned", "stuck"]  # no run diverged
    assert len(pairs) == 2 and all(len(axis.lines) == 8 for axis in pairs)
    assert "8 of 8 learned" in pairs[0].get_xticklabels()[1].get_text()
    assert figures["limits"].get_suptitle() == "Post-norm's rate limit falls faster with depth than pre-norm's"
    steep = next(
        line.get_xydata() for line in figures["limits"].axes[0].lines if line.get_color() == study_figure.ORANGE
    )
    assert np.diff(np.log2(steep[:, 1])) == pytest.approx(-1)
    assert figures["mechanism"].axes[0].lines[0].get_ydata()[0] == pytest.approx(0.6, abs=0.05)
    assert {text.get_text() for text in figures["mechanism"].axes[1].texts} >= {"0"}
    recovery = figures["recovery"]
    assert "post-norm 0 of 8, warm-up 400 8 of 8, DeepNorm 8 of 8" in recovery.get_suptitle()
    bars = [text.get_text() for text in recovery.axes[2].get_xticklabels()]
    assert bars == ["post-norm\nwarm-up 100", "post-norm\nwarm-up 400", "DeepNorm\nwarm-up 100"]
    assert len({line.get_linewidth() for line in recovery.axes[0].lines[1:]}) == 2  # equal limits stay visible


def test_an_incomplete_figure_says_what_is_missing(planted) -> None:
    early = (planted["group"] == "selection") | ((planted["group"] == "losses") & (planted["seed"] < 14))
    figures = draw(without(planted, ~early))
    listed = planted["group"].isin(["selection", "six", "deep", "deep_pre", "deep_b2t"]).sum()
    selected = (planted["group"] == "selection").sum()
    title = figures["final_losses"].get_suptitle().replace("\n", " ")
    assert title.endswith(f"({selected} of {listed} runs are recorded)")
    assert figures["paired_losses"].get_suptitle() == "Final loss of the scored seeds (18 of 48 runs are recorded)"
    assert figures["limits"].get_suptitle() == "Rate limit by depth (test 7 not run)"
    assert not any(axis.get_legend_handles_labels()[1][0].count("k ") for axis in figures["limits"].axes)
    assert figures["mechanism"] is figures["recovery"] is None


@pytest.mark.parametrize("layers", [6, 12, 24, 48])
def test_a_title_fits_its_figure_at_every_stage(planted, layers: int) -> None:
    for figure in draw(without(planted, planted["layers"] > layers)).values():
        if figure is not None:
            figure.canvas.draw()
            title = figure._suptitle.get_window_extent()
            assert title.x0 >= 0 and title.x1 <= figure.bbox.width, figure.get_suptitle()


def test_limits_at_one_depth_are_not_drawn_over_depth(planted) -> None:
    cells = without(planted, (planted["group"] != "selection") | (planted["layers"] != 12))
    record = summarize(cells)
    assert len(limits_table(record)) == 3 and study_figure.draw_limits(cells, record) is None


def test_no_faster_fall_is_not_drawn_as_one() -> None:
    figures = draw(make_cells(learns=lambda cell: cell.order == "deepnorm" or float(cell.lr) < 0.007))
    assert figures["limits"].get_suptitle() == "Rate limit by depth: no faster fall is shown"
