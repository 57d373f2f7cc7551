"""The first norm-order study: choices, conclusions and figures from known values, and what notebook 04 says of it."""

import json
import math

import pytest
from made_studies import make_cell, make_study

from analysis.norm_order.cells import CELL, at_chosen_rates, choose_rates, read_cells, read_curves, read_gradient_norms
from analysis.norm_order.figure import draw_loss_curves
from analysis.norm_order.run import RECORDS
from analysis.norm_order.run_folder import NATS
from analysis.norm_order.summary import (
    FACTORIAL,
    difference,
    endings,
    order_differences,
    start_differences,
    summarize,
)
from analysis.norm_order.tables import order_table, start_table
from analysis.report.records import read_lines
from analysis.report.style import PAGE_WIDTH


def test_differences_are_paired_by_seed_and_have_students_interval() -> None:
    rows = order_differences(read_cells(make_study()), 4)
    assert list(zip(rows["layers"], rows["scaled"], strict=True)) == [(4, False), (4, True), (8, False), (8, True)]
    assert list(rows["difference"]) == pytest.approx([0.5] * 4)
    assert list(rows["half_width"]) == pytest.approx([4.3026527 * 0.01 / 3**0.5] * 4)  # the seed effect cancels
    assert set(rows["lr_pre"]) == set(rows["lr_post"]) == {3e-3} and set(rows["seeds"]) == {3}
    cells = read_cells([make_cell(4, *arm, "3e-3", 1, 4.0) for arm in (("pre", True), ("post", True))])
    assert difference(cells, "order", "pre", "post") == (0.0, pytest.approx(math.nan, nan_ok=True), 1)


def test_a_rate_at_which_a_run_diverged_is_not_chosen() -> None:
    assert set(choose_rates(read_cells(make_study()), 4).values()) == {3e-3}
    records = make_study(_4_post_1={"loss": 3.0, "lowest_loss": 2.7})
    assert choose_rates(read_cells(records), 4)["post", True] == 1e-3


@pytest.mark.parametrize(
    ("metrics", "state"),
    [
        ({"loss": 4.4}, "learned"),
        ({"loss": 4.61}, "stuck"),
        ({"loss": 4.9}, "stuck"),
        ({"loss": 4.4, "lowest_loss": 4.2}, "learned"),
        ({"loss": 4.4, "lowest_loss": 4.1}, "diverged"),
        ({"loss": 4.1, "non_finite": 1}, "diverged"),
    ],
)
def test_a_cell_is_classified_by_the_stated_rules(metrics, state) -> None:
    assert list(read_cells([make_cell(2, "pre", True, "1e-3", 1, **metrics, context_free_loss=4.7)])["state"]) == [
        state
    ]


def test_two_records_of_one_cell_are_refused() -> None:
    with pytest.raises(ValueError, match="a cell must have one record, but .*'layers': 8.* has two"):
        read_cells([make_cell(8, "pre", True, "3e-3", 1, 4.0)] * 2)


def test_the_summary_has_every_difference_and_count() -> None:
    cells = read_cells(make_study(_8_post_3={"loss": 5.95}))
    record = summarize(cells, 4)
    value = {name: entry["value"] for name, entry in record["metrics"].items()}
    assert value["4_layers/scaled/difference"] == pytest.approx(0.5)
    assert value["4_layers/pre/unscaled_minus_scaled"] == pytest.approx(0.2)
    assert value["4_layers/post/lr_0.001/unscaled_minus_scaled"] == pytest.approx(0.2)
    assert (value["8_layers/scaled/post/stuck"], value["8_layers/scaled/post/learned"]) == (1, 2)
    assert value["8_layers/unscaled/post/learned"] == 3 and value["8_layers/scaled/pre/stuck"] == 0
    assert value["post/stuck"] == 1 and value["post/learned"] == 17 and value["pre/diverged"] == 0
    assert value["cpu_time"] == pytest.approx(2.0 * 36) and value["scored_entropy"] == 6.5
    json.dumps(record, allow_nan=False)
    table = order_table(order_differences(cells, 4))
    assert table["post - pre, 95 %"][1] == "+0.500 +- 0.025" and table["post-norm runs"][3] == "2 learned, 1 stuck"
    starts = start_table(start_differences(cells, 4))
    assert list(starts["learning rate"]) == ["chosen"] * 4 + ["0.001", "0.003"] * 2
    assert (starts["not scaled - scaled, 95 %"] == "").tolist() == [False, False, True, False] + [False] * 4


@pytest.mark.parametrize("metrics", [{"loss": 4.1, "non_finite": 1}, {"loss": 5.95}])
def test_a_run_that_did_not_learn_has_no_final_loss_to_compare(metrics) -> None:
    cells = read_cells(make_study(_8_post_2=metrics))
    record = summarize(cells, 4)
    assert "8_layers/scaled/difference" not in record["metrics"] and "8_layers/scaled/post" not in record["metrics"]
    assert record["metrics"]["8_layers/scaled/pre"]["value"] == pytest.approx(4.3)
    assert "8_layers/post/unscaled_minus_scaled" not in record["metrics"]
    row = order_table(order_differences(cells, 4)).iloc[3]
    assert (row["post-norm (lr)"], row["post - pre, 95 %"]) == ("- (0.003)", "")
    assert row["post-norm runs"] == f"2 learned, 1 {'diverged' if 'non_finite' in metrics else 'stuck'}"


def test_a_run_that_recovers_counts_as_unstable() -> None:
    records = make_study()
    cell = {"layers": 8, "order": "pre", "scaled": True, "lr": "3e-3", "seed": 1}
    (record,) = (record for record in records if record["config"]["cell"] == cell)
    record["config"]["curve"] = [5.0, 4.4, 4.7, 4.2]
    counts = endings(read_cells(records))
    assert counts.loc[8, "pre", True].to_dict() == {"learned": 3, "stuck": 0, "diverged": 0, "unstable": 1}
    assert counts[["learned", "stuck", "diverged"]].to_numpy().sum() == len(records)


def test_the_figure_has_its_panels_and_units() -> None:
    records = make_study()
    cells, means = read_cells(records), read_curves(records)
    curves = draw_loss_curves(means, cells, 4)
    assert len(curves.axes) == 4
    assert curves.get_figwidth() == PAGE_WIDTH and NATS in curves.axes[0].get_ylabel()
    assert curves.get_suptitle().replace("\n", " ") == (
        "Runs that learned, initialization scaled by 1/sqrt(2 L): pre-norm 6 of 6, post-norm 6 of 6; "
        "not scaled: pre-norm 6 of 6, post-norm 6 of 6"
    )
    assert list(means["step"].unique()[:2]) == [13, 38]  # the middles of the first two windows of 25 steps


def test_the_claims_of_notebook_04_about_gradients_and_failures_hold() -> None:
    records = list(read_lines(RECORDS / "norm_order.jsonl").values())
    cells = read_cells(records)
    norms = read_gradient_norms(records).merge(cells[[*CELL, "state"]], on=CELL)
    stuck = cells[cells["state"] == "stuck"]
    assert set(stuck["order"]) == {"post"} and (stuck["train_loss"] - stuck["scored_entropy"]).abs().max() < 0.02
    curves = read_curves(records).merge(stuck[[*CELL, "scored_entropy"]], on=CELL)
    below = curves[curves["loss"] < curves["scored_entropy"] - 0.05]  # more than the noise of a mean of 25 steps
    fell = below[[*CELL]].drop_duplicates()
    assert fell[["layers", "scaled", "lr"]].to_numpy().tolist() == [[12, True, 6e-3]] * 2

    by_layer = norms.pivot(index=[*CELL, "state", "step"], columns="layer", values="norm")
    top = by_layer.ffill(axis=1).iloc[:, -1]
    later = by_layer.min(axis=1) / top
    later = later[(later.index.get_level_values("step") == 500) & (later.index.get_level_values("state") == "stuck")]
    assert len(later) == len(stuck) and later.max() < 1e-3
    first = by_layer.xs(1, level="step")
    uneven = (first.max(axis=1) / first.min(axis=1)).groupby(["order", "scaled"]).max()
    assert uneven["post", True] < 1.3 and 1.3 < uneven["post", False] < 3
    falls = (first[0] / top.xs(1, level="step")).groupby("order")
    assert falls.min()["pre"] > 1.5 and falls.max()["post"] < 1.3
    deep = at_chosen_rates(cells, cells, FACTORIAL)
    learned = (
        deep[deep["layers"].isin([24, 48])].groupby("order")["state"].agg(["size", lambda s: (s == "learned").sum()])
    )
    assert learned.loc["pre"].tolist() == [8, 8] and learned.loc["post"].tolist() == [8, 1]
