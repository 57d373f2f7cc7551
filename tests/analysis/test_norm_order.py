"""Choices, conclusions and figures of the norm-order study from known values."""

import json
import math
import shutil
from pathlib import Path

import pytest
from made_cells import make_study, records_of, write_cell

from analysis.norm_order.cells import at_chosen_rates, choose_rates, read_cells, read_curves, read_gradient_norms
from analysis.norm_order.figure import draw_failures, draw_gradient_norms, draw_loss_curves, draw_rates
from analysis.norm_order.run_folder import NATS
from analysis.norm_order.summary import (
    endings,
    equal_rate_differences,
    interaction,
    mean_and_interval,
    order_differences,
    order_table,
    start_differences,
    start_table,
    summarize,
)
from analysis.report.style import PAGE_WIDTH


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def study(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def test_differences_are_paired_by_seed_and_have_students_interval(study) -> None:
    rows = order_differences(read_cells(records_of(study)), 4)
    assert list(zip(rows["layers"], rows["scaled"], strict=True)) == [(4, False), (4, True), (8, False), (8, True)]
    assert list(rows["difference"]) == pytest.approx([0.5] * 4)
    assert list(rows["half_width"]) == pytest.approx([4.303 * 0.01 / 3**0.5] * 4)  # the seed effect cancels
    assert set(rows["lr_pre"]) == set(rows["lr_post"]) == {3e-3} and set(rows["seeds"]) == {3}
    assert mean_and_interval([1.0, 3.0]) == (2.0, pytest.approx(12.706))
    assert math.isnan(mean_and_interval([1.0])[1])


def test_a_rate_at_which_a_run_diverged_is_not_chosen(study) -> None:
    assert set(choose_rates(read_cells(records_of(study)), 4).values()) == {3e-3}
    write_cell(study, 4, "post", True, "3e-3", 1, 3.0, lowest_loss=2.7)
    assert choose_rates(read_cells(records_of(study)), 4)["post", True] == 1e-3


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
def test_a_cell_is_classified_by_the_stated_rules(tmp_path, metrics, state) -> None:
    write_cell(tmp_path, 2, "pre", True, "1e-3", 1, **metrics, context_free_loss=4.7)
    assert list(read_cells(records_of(tmp_path))["state"]) == [state]


def test_the_summary_has_every_difference_and_count(study) -> None:
    write_cell(study, 8, "post", False, "3e-3", 3, 5.95)
    cells = read_cells(records_of(study))
    record = summarize(cells, 4)
    value = {name: entry["value"] for name, entry in record["metrics"].items()}
    assert value["4_layers/scaled/difference"] == pytest.approx(0.5)
    assert value["4_layers/pre/unscaled_minus_scaled"] == pytest.approx(0.2)
    assert value["4_layers/post/lr_0.001/unscaled_minus_scaled"] == pytest.approx(0.2)
    assert value["4_layers/interaction"] == pytest.approx(0) and value["scored_entropy"] == 6.5
    assert value["4_layers/pre_scaled/lr_0.001/loss"] == pytest.approx(4.5)
    assert (value["8_layers/unscaled/post/stuck"], value["8_layers/unscaled/post/learned"]) == (1, 2)
    assert value["8_layers/scaled/post/learned"] == 3 and value["8_layers/unscaled/pre/stuck"] == 0
    assert value["post/stuck"] == 1 and value["post/learned"] == 17 and value["pre/diverged"] == 0
    assert value["cpu_time"] == pytest.approx(2.0 * 36)
    json.dumps(record, allow_nan=False)
    table = order_table(order_differences(cells, 4))
    assert table["post - pre, 95 %"][1] == "+0.500 +- 0.025" and table["post-norm runs"][2] == "2 learned, 1 stuck"
    starts = start_table(start_differences(cells, 4))
    assert list(starts["learning rate"]) == ["chosen"] * 4 + ["0.001", "0.003"] * 2
    assert (starts["not scaled - scaled, 95 %"] == "").tolist() == [False, False, True, False] + [False] * 4


@pytest.mark.parametrize("metrics", [{"loss": 4.1, "non_finite": 1}, {"loss": 5.95}])
def test_a_run_that_did_not_learn_has_no_final_loss_to_compare(study, metrics) -> None:
    write_cell(study, 8, "post", True, "3e-3", 2, **metrics)
    cells = read_cells(records_of(study))
    record = summarize(cells, 4)
    assert "8_layers/scaled/difference" not in record["metrics"] and "8_layers/scaled/post" not in record["metrics"]
    assert record["metrics"]["8_layers/scaled/pre"]["value"] == pytest.approx(4.3)
    assert "8_layers/post/unscaled_minus_scaled" not in record["metrics"]
    row = order_table(order_differences(cells, 4)).iloc[3]
    assert (row["post-norm (lr)"], row["post - pre, 95 %"]) == ("- (0.003)", "")
    assert row["post-norm runs"] == f"2 learned, 1 {'diverged' if 'non_finite' in metrics else 'stuck'}"


def test_the_effect_of_scaling_may_differ_between_orders(study) -> None:
    for seed in (1, 2, 3):
        write_cell(study, 4, "post", False, "3e-3", seed, 4.8 + 0.15 * seed)
    mean, half_width = interaction(read_cells(records_of(study)), 4, 4)
    assert mean == pytest.approx(-0.2) and half_width == pytest.approx(4.303 * 0.04 / 3**0.5)


def test_seeds_of_only_one_order_are_not_paired(study) -> None:
    for path in [*study.glob("8_post_True_3e-3_1*"), *study.glob("8_pre_True_3e-3_[23]*")]:
        path.unlink()
    row = order_differences(read_cells(records_of(study)), 4).iloc[3]
    assert row["seeds"] == 0 and math.isnan(row["difference"])


def test_a_run_that_recovers_counts_as_unstable(study) -> None:
    assert not any(cell.unstable for cell in read_cells(records_of(study)).itertuples() if cell.order == "pre")
    (path,) = study.glob("8_pre_True_3e-3_1.json")
    record = json.loads(path.read_text())
    record["config"]["curve"] = [5.0, 4.4, 4.7, 4.2]
    path.write_text(json.dumps(record))
    cells = read_cells(records_of(study))
    (state,) = cells[cells["unstable"] & (cells["order"] == "pre")]["state"]
    assert state == "learned"
    assert summarize(cells, 4)["metrics"]["pre/unstable"]["value"] == 1
    counts = endings(cells)
    assert counts.loc[8, "pre", True].to_dict() == {"learned": 3, "stuck": 0, "diverged": 0, "unstable": 1}
    assert counts[["learned", "stuck", "diverged"]].to_numpy().sum() == len(cells)


def test_the_orders_are_also_compared_at_equal_rates(study) -> None:
    cells = read_cells(records_of(study))
    metrics = summarize(cells, 4)["metrics"]
    rows = order_table(equal_rate_differences(cells, 4))
    assert (
        len(rows) == 4
        and rows["pre-norm (lr)"][0].endswith("(0.001)")
        and rows["post-norm (lr)"][1].endswith("(0.003)")
    )
    assert metrics["4_layers/scaled/lr_0.001/difference"]["value"] == pytest.approx(0.5)


@pytest.mark.parametrize("pattern", ["*_post_*", "*_False_*", "4_pre_True_1e-3_2*"])
def test_an_incomplete_study_has_no_summary(study, pattern: str) -> None:
    for path in study.glob(pattern):
        path.unlink()
    with pytest.raises(ValueError, match="must have all cells at 4 layers"):
        summarize(read_cells(records_of(study)), 4)


def test_two_records_of_one_cell_are_refused(study) -> None:
    (path,) = study.glob("8_pre_True_3e-3_1.json")
    path.with_name("again.json").write_text(path.read_text())
    with pytest.raises(ValueError, match="a cell must have one record, but .*'layers': 8.* has two"):
        read_cells(records_of(study))


def test_the_figures_have_one_panel_per_initialization_and_depth_and_units(study) -> None:
    cells = read_cells(records_of(study))
    curves = draw_loss_curves(read_curves(records_of(study)), cells, 4)
    norms = draw_gradient_norms(read_gradient_norms(records_of(study)), cells, 4)
    failures = draw_failures(read_gradient_norms(records_of(study)), cells, 4, (1, 50))
    assert [len(figure.axes) for figure in (curves, norms, draw_rates(cells, 4), failures)] == [4, 4, 2, 2]
    assert all(figure.get_figwidth() == PAGE_WIDTH for figure in (norms, failures))
    runs = at_chosen_rates(cells, cells, 4)
    counts = (
        (runs["state"] == "learned").groupby([runs["scaled"], runs["order"]]).agg(["sum", "size"]).agg(tuple, axis=1)
    )
    learned = {key: "{} of {}".format(*count) for key, count in counts.items()}
    assert curves.get_suptitle().replace("\n", " ") == (
        f"Runs that learned, initialization scaled by 1/sqrt(2 L): pre-norm {learned[True, 'pre']}, post-norm "
        f"{learned[True, 'post']}; not scaled: pre-norm {learned[False, 'pre']}, post-norm {learned[False, 'post']}"
    )
    for axis in failures.axes:
        low, high = axis.get_ylim()
        assert sum(low <= tick <= high for tick in axis.get_yticks()) >= 2
    assert NATS in curves.axes[0].get_ylabel() and norms.axes[0].get_yscale() == "log"
    assert len(norms.axes[1].lines[0].get_xdata()) == 8
    means = read_curves(records_of(study))["step"].unique()
    assert list(means[:2]) == [13, 38]  # the middles of the first two windows of 25 steps
