"""Question 4 of the second norm-order study: the rule that tells stuck runs at step 100."""

import numpy as np
import pandas as pd
import pytest
from made_study import make_cells

from analysis.norm_order.mechanism import CANDIDATES, LOSS, Rule, early_statistics, fix_rule, judge, mechanism_cells
from analysis.norm_order.outcome import summarize
from analysis.norm_order.study import RECORDS
from analysis.norm_order.study_tests import read_study


@pytest.fixture(scope="module")
def planted() -> pd.DataFrame:
    return make_cells()


def test_the_rule_is_fixed_on_one_half_and_judged_on_the_other(planted) -> None:
    cells = mechanism_cells(planted)
    assert list(cells["id"]) == sorted(cells["id"]) and list(cells["judges"][:3]) == [True, False, True]
    assert set(cells["order"]) == {"post"} and set(cells["layers"]) == {6, 12, 24, 48}
    mechanism = summarize(planted)["config"]["mechanism"]
    assert mechanism["rule"]["statistic"] == "constant_share/mlp" and mechanism["rule"]["above"]
    assert mechanism["accuracy"] == 1.0 > mechanism["loss_accuracy"] and mechanism["n"] == (len(cells) + 1) // 2
    confusion = mechanism["confusion"]
    assert sum(confusion.values()) == mechanism["n"] and confusion["stuck, predicted not stuck"] == 0
    assert mechanism["gained"] == confusion["stuck, predicted stuck"] and mechanism["lost"] == 0
    flipped = cells.assign(**{"constant_share/mlp": np.where(cells["judges"], -cells["constant_share/mlp"], 0)})
    assert fix_rule(flipped[~flipped["judges"]], CANDIDATES[:1] + (LOSS,)).statistic == LOSS  # only its half counts


def test_the_condition_alone_predicts_what_the_first_half_did_under_it() -> None:
    stuck = {True: [True, True, False, False], False: [True, False, False]}  # by `judges`, one condition each
    rates = {True: [1.0, 2.0, 3.0, 4.0], False: [1.0, 2.0, 3.0]}  # 2: wrong; 4: unknown, so the majority's
    cells = pd.concat(
        pd.DataFrame({"judges": judges, "stuck": stuck[judges], "lr": rates[judges]}) for judges in (True, False)
    )
    cells = cells.assign(layers=24, warmup=100, state=np.where(cells["stuck"], "stuck", "learned"))
    cells = cells.assign(**{name: cells["stuck"] + 0.5 for name in (*CANDIDATES, LOSS)})
    assert judge(cells)["condition_accuracy"] == 0.75 and judge(cells)["accuracy"] == 1.0


def test_at_24_layers_and_3e_3_the_rule_misses_both_stuck_runs_and_constant_share_is_highest_in_them() -> None:
    cells = read_study(RECORDS)
    rule = Rule(**summarize(cells)["config"]["mechanism"]["rule"])
    some = cells[(cells["group"] == "losses") & (cells["layers"] == 24) & (cells["order"] == "post")]
    stuck, share = some["state"] == "stuck", some["constant_share/mlp"]
    assert sorted(share[stuck].round(2)) == [0.85, 0.94] and share[~stuck].max().round(2) == 0.64
    assert stuck.sum() == 2 and not rule.predict(some).any()


def test_the_rule_waits_for_the_cells_that_the_grid_adds(planted) -> None:
    added = (planted["group"] == "warmup") & (planted["layers"] == 24) & (planted["lr"] > 6e-3)
    config = summarize(planted[~added])["config"]
    assert added.sum() == 2 and len(config["cells_to_add"]) == 1 and config["mechanism"] is None
    assert config["tests"][8]["decision"] == "not run"


def test_equal_rules_are_decided_by_the_order_of_the_list() -> None:
    stuck = np.array([False, False, True, True])
    cells = pd.DataFrame({"stuck": stuck, "b": [4.0, 3.0, 2.0, 1.0], "a": [1.0, 2.0, 3.0, 4.0]})
    assert vars(fix_rule(cells, ["a", "b"])) == {"statistic": "a", "threshold": 2.5, "above": True, "accuracy": 1.0}
    rule = fix_rule(cells, ["b", "a"])
    assert (rule.statistic, rule.above) == ("b", False) and list(rule.predict(cells)) == stuck.tolist()
    constant = cells.assign(a=1.0)
    assert fix_rule(constant, ["a", "b"]).statistic == "b"


def test_a_rule_no_better_than_the_loss_is_refuted(planted) -> None:
    config = summarize(planted.assign(**{LOSS: planted["constant_share/mlp"]}))["config"]
    assert config["tests"][8]["decision"] == "supported" and config["refuted"]["question 4"]
    inverted = 1 - planted["constant_share/mlp"]
    config = summarize(planted.assign(**{"constant_share/mlp": inverted}))["config"]
    assert config["mechanism"]["rule"]["above"] is False and config["refuted"]["question 4"]


def test_statistics_are_of_step_100() -> None:
    columns = {name: [1.0, 3.0] for name in CANDIDATES}
    config = {"statistics": {"50": {}, "100": columns}, "curve": [5.0, 4.9, 4.8, 4.7, 4.6]}
    wanted = dict.fromkeys(CANDIDATES, 2.0) | {"gradient_norm/mlp": 1 / 3, LOSS: 4.7}
    assert early_statistics(config) == pytest.approx(wanted)
    assert early_statistics({"statistics": {"50": columns}, "curve": [5.0] * 5}) == {}
    assert early_statistics({"curve": [5.0]}) == {}
    columns["gradient_norm/mlp"] = [1.0, None]
    assert early_statistics(config) == {}
