"""`analysis/norm_order/decide.py`: the committed outcome, and what planted outcomes of the second study give."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from made_studies import LIMITS, learns, loss, make_cells, tells

from analysis.norm_order import decide as script
from analysis.norm_order.cells import CANDIDATES, LOSS, early_statistics
from analysis.norm_order.decide import RECOVERS, decide
from analysis.norm_order.hypotheses import Rule, fix_rule, holm, mechanism_cells
from analysis.norm_order.limits import (
    exponent,
    observations,
    place,
    read_limits,
    read_outcomes,
    slope_test,
    study_cells,
)
from analysis.norm_order.run import RECORDS, Cell
from analysis.report.records import read_lines


@pytest.fixture(scope="module")
def planted() -> pd.DataFrame:
    return make_cells()


@pytest.fixture(scope="module")
def outcome(planted) -> dict:
    return decide(planted, planted[:0])


@pytest.fixture(scope="module")
def committed() -> pd.DataFrame:
    return study_cells(read_lines(RECORDS / "study.jsonl").values())


def config_of(cells: pd.DataFrame) -> dict:
    return decide(cells, cells[:0])["config"]


def test_the_committed_summaries_match_the_committed_cells(tmp_path, monkeypatch, capsys) -> None:
    """Except for the last digits, which may differ between versions of numpy and scipy."""
    for name in ("norm_order.jsonl", "study.jsonl", "repeated.jsonl"):
        (tmp_path / name).symlink_to(RECORDS / name)
    monkeypatch.setattr("sys.argv", ["decide.py", "--records", str(tmp_path)])
    assert script.main() == 0 and " 10 DeepNorm learns where post-norm is stuck: supported" in capsys.readouterr().out
    for name in ("norm_order.json", "norm_order_study.json"):
        once, again = (json.loads((folder / name).read_text()) for folder in (RECORDS, tmp_path))
        for key in ("metrics", "config"):
            assert again[key] == nearly(once[key])


def nearly(value: object) -> object:
    """The same value, equal to one that differs in the last digits of its numbers."""
    if isinstance(value, dict):
        return {key: nearly(part) for key, part in value.items()}
    if isinstance(value, list):
        return [nearly(part) for part in value]
    return pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value


def test_an_incomplete_study_is_not_decided(tmp_path, monkeypatch, capsys) -> None:
    lines = (RECORDS / "norm_order.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "norm_order.jsonl").write_text("".join(lines[:-1]))
    monkeypatch.setattr("sys.argv", ["decide.py", "--records", str(tmp_path)])
    assert script.main() == 2
    assert capsys.readouterr().out.startswith("first study: 1 of 66 cells have no record in")
    assert not (tmp_path / "norm_order.json").exists()


def test_the_rates_of_the_cells_are_those_that_the_plans_rule_chooses(committed) -> None:
    rates = {(row["family"], row["layers"], row["order"]): row["lr"] for row in config_of(committed)["rates"]}
    scored = committed[committed["group"].isin(["losses", "race", "gpt"])]
    assert all(rates[row.family, row.layers, row.order] == row.lr for row in scored.itertuples())


def test_planted_effects_are_found(planted, outcome) -> None:
    found = outcome["config"]
    wanted = ["supported"] * 12
    wanted[2] = wanted[3] = "not supported"  # B2T and post-norm differ by less than the noise
    assert [row["decision"] for row in found["tests"]] == wanted
    first, third, seventh, eighth = (found["tests"][test - 1] for test in (1, 3, 7, 8))
    assert first["effect"] == pytest.approx(-0.15, abs=0.02) and first["low"] < first["effect"] < first["high"] < 0
    assert (first["method"], first["n"]) == ("paired t", 8) and "post 8 of 8 learned" in first["note"]
    assert third["low"] < 0 < third["high"]  # the interval is there although the test does not reject
    assert seventh["effect"] == pytest.approx(-1) and seventh["n"] == 16 and "6, 12, 24, 48 layers" in seventh["note"]
    assert (eighth["n"], eighth["effect"], eighth["p"]) == (8, 1.0, pytest.approx(1 / 256))
    assert found["exponents"]["post"]["k"] == pytest.approx(1) and found["exponents"]["pre"]["k"] == pytest.approx(0)
    for order, limits in LIMITS.items():
        rows = observations(read_limits(planted), order)
        limits = {layers: at for layers, at in limits.items() if (order, layers) != ("b2t", 48)}  # one rate, no limit
        assert rows.groupby("layers")["place"].agg(["min", "max"]).to_dict() == {"min": limits, "max": limits}
    recovered = found["recovery"]
    assert recovered[f"b2t, 24 layers: {RECOVERS}"] and recovered["b2t, 48 layers: learns at twice post-norm's limit"]
    assert recovered[f"b2t, 12 layers: {RECOVERS}"] is False and recovered[f"warm-up of 400, 24 layers: {RECOVERS}"]
    assert recovered["warm-up of 400, 12 layers: 100 steps do so too"] and found["tests"][11]["unit"] == "nats/token"
    assert not recovered["warm-up of 400, 24 layers: 100 steps do so too"] and set(found["refuted"].values()) == {False}


def test_no_effect_is_not_claimed() -> None:
    def alike(cell: Cell) -> bool:
        return cell.seed % 2 == 0 if 200 < cell.seed < 300 else place(float(cell.lr)) <= 5

    def noisy(cell: Cell) -> float:
        return 3.5 + np.random.default_rng([cell.seed, *cell.order.encode()]).normal(0, 0.01)

    config = config_of(make_cells(learns=alike, loss=noisy, tells=lambda cell, stuck: tells(cell, False)))
    assert [config["tests"][test - 1].pop("decision") for test in (8, 10)] == ["too few pairs"] * 2  # 4 of 8 are stuck
    assert {row.get("decision", "not supported") for row in config["tests"]} == {"not supported"}
    assert config["refuted"]["question 1"] and config["refuted"]["question 4"] and config["refuted"]["question 3"]
    assert config["refuted"]["question 2"] is False  # no difference is not the opposite one


def test_the_opposite_effect_is_told_and_refutes() -> None:
    config = config_of(make_cells(loss=lambda cell: loss(cell) + {"pre": -0.15, "post": 0.15}.get(cell.order, 0)))
    decisions = [row["decision"] for row in config["tests"]]
    assert [decisions[test - 1] for test in (1, 2, 11, 12)] == ["the opposite is supported"] * 4
    assert decisions[2] == "supported" and config["tests"][2]["effect"] < 0
    assert config["refuted"]["question 2"] and config["refuted"]["question 5"]


def test_a_seed_that_did_not_learn_takes_the_t_test_away() -> None:
    """Post-norm is lower with 5 seeds, stuck with 2; with 1 neither learns."""

    def some(cell: Cell) -> bool:
        return learns(cell) and cell.seed != 18 and (cell.order, cell.layers, cell.seed // 2) != ("post", 12, 6)

    cells = make_cells(learns=lambda cell: some(cell) and (cell.order, cell.layers, cell.seed) != ("post", 12, 11))
    config = config_of(cells)
    first = config["tests"][0]
    assert (first["method"], first["n"], first["effect"]) == ("exact sign test", 7, 4 / 7)
    assert first["p"] == 1.0 and first["decision"] == "not supported" and first["unit"] == "share of pairs"
    assert first["note"] == "post 4 of 8 learned, pre 7 of 8 learned"
    assert config["tests"][1]["n"] == 7 and config["tests"][1]["p"] == pytest.approx(2 / 2**7)
    assert config["recovery"]["b2t, 12 layers: loss near post-norm's"]  # where post-norm learns


def test_slopes_and_their_difference_have_the_values_of_a_regression() -> None:
    """Of scipy's linregress: slopes -0.5 and -1.75 with standard errors 0.25 and 0.26020824993326676."""
    layers = [6, 6, 12, 12, 24, 24]
    pre = pd.DataFrame({"layers": layers, "place": [8, 7, 7, 7, 6, 7]})
    post = pd.DataFrame({"layers": layers, "place": [6, 6, 4, 5, 3, 2]})
    k = exponent(post)
    assert k["k"] == pytest.approx(1.75) and k["high"] - k["k"] == pytest.approx(2.7764451 * 0.26020825, rel=1e-6)
    assert (k["k_deepest_higher"], k["k_deepest_lower"]) == pytest.approx((1.25, 2.25))
    test, error = (
        slope_test(post, pre),
        math.hypot(0.25, 0.26020824993326676),
    )  # the pooled variance is the mean of both
    assert test["effect"] == pytest.approx(-1.25) and test["p_unfavourable"] > test["p"]
    assert test["high"] == pytest.approx(-1.25 + 2.306004135 * error)
    flat = pd.DataFrame({"layers": layers, "place": [5] * 6})  # limits on a line have the variance of rounding
    assert exponent(flat)["high"] == pytest.approx(2.7764451 * (1 / 12 / 4) ** 0.5)


def test_holm_steps_down_and_never_decreases() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.004] + [1.0] * 11) == pytest.approx([0.048] + [1.0] * 11)


def test_the_rule_is_fixed_on_one_half_and_judged_on_the_other(planted, outcome) -> None:
    cells = mechanism_cells(planted)
    assert list(cells["id"]) == sorted(cells["id"]) and list(cells["judges"][:3]) == [True, False, True]
    assert set(cells["order"]) == {"post"} and set(cells["layers"]) == {6, 12, 24, 48}
    mechanism = outcome["config"]["mechanism"]
    assert mechanism["rule"]["statistic"] == "constant_share/mlp" and mechanism["rule"]["above"]
    assert mechanism["accuracy"] == 1.0 > mechanism["loss_accuracy"] and mechanism["n"] == (len(cells) + 1) // 2
    confusion = mechanism["confusion"]
    assert sum(confusion.values()) == mechanism["n"] and confusion["stuck, predicted not stuck"] == 0
    assert mechanism["gained"] == confusion["stuck, predicted stuck"] and mechanism["lost"] == 0
    flipped = cells.assign(**{"constant_share/mlp": np.where(cells["judges"], -cells["constant_share/mlp"], 0)})
    assert fix_rule(flipped[~flipped["judges"]], CANDIDATES[:1] + (LOSS,)).statistic == LOSS  # only its half counts


def test_equal_rules_are_decided_by_the_order_of_the_list() -> None:
    stuck = np.array([False, False, True, True])
    cells = pd.DataFrame({"stuck": stuck, "b": [4.0, 3.0, 2.0, 1.0], "a": [1.0, 2.0, 3.0, 4.0]})
    assert vars(fix_rule(cells, ["a", "b"])) == {"statistic": "a", "threshold": 2.5, "above": True, "accuracy": 1.0}
    rule = fix_rule(cells, ["b", "a"])
    assert (rule.statistic, rule.above) == ("b", False) and list(rule.predict(cells)) == stuck.tolist()


def test_at_24_layers_and_3e_3_the_rule_misses_both_stuck_runs_and_constant_share_is_highest_in_them(committed) -> None:
    rule = Rule(**config_of(committed)["mechanism"]["rule"])
    some = committed[(committed["group"] == "losses") & (committed["layers"] == 24) & (committed["order"] == "post")]
    stuck, share = some["state"] == "stuck", some["constant_share/mlp"]
    assert sorted(share[stuck].round(2)) == [0.85, 0.94] and share[~stuck].max().round(2) == 0.64
    assert stuck.sum() == 2 and not rule.predict(some).any()


def test_statistics_are_of_step_100() -> None:
    columns = {name: [1.0, 3.0] for name in CANDIDATES}
    config = {"statistics": {"50": {}, "100": columns}, "curve": [5.0, 4.9, 4.8, 4.7, 4.6]}
    wanted = dict.fromkeys(CANDIDATES, 2.0) | {"gradient_norm/mlp": 1 / 3, LOSS: 4.7}
    assert early_statistics(config) == pytest.approx(wanted)
    assert early_statistics({"statistics": {"50": columns}, "curve": [5.0] * 5}) == {}
    columns["gradient_norm/mlp"] = [1.0, None]
    assert early_statistics(config) == {}


def test_the_committed_repeats_ran_on_another_cpu_type(committed) -> None:
    repeats = read_outcomes(read_lines(RECORDS / "repeated.jsonl").values()).set_index("id")
    assert (repeats["cpu"] != committed.set_index("id").loc[repeats.index, "cpu"]).all()


def test_longer_training_compares_the_placements_for_each_warm_up() -> None:
    def planted(cell: Cell) -> float:  # post-norm is lower by 0.1 with 100 steps of warm-up, and 0.02 higher with 400
        lower = {("post", 100): 0.1, ("post", 400): -0.02}.get((cell.order, cell.warmup), 0.0)
        return 3.0 + 0.01 * (cell.seed % 4) * (1 if cell.order == "post" else 1.1) - lower

    cells = make_cells(learns=lambda cell: True, loss=planted, study="third")
    assert len(cells) == 16 and set(cells["warmup"]) == {100, 400}
    tests = script.compare_long(cells)["config"]["tests"]
    effects = {name: test["effect"] for name, test in tests.items()}
    assert effects == pytest.approx({"warm-up of 100": -0.1015, "warm-up of 400": 0.0185})
    assert [test["n"] for test in tests.values()] == [4, 4]
    p, q = (test["p"] for test in tests.values())
    assert [test["p_holm"] for test in tests.values()] == pytest.approx([2 * p, max(q, 2 * p)])
