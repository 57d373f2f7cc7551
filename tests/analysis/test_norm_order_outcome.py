"""The outcome of the second norm-order study: tests and limits on planted outcomes, at every stage."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from made_cells import write_cell
from made_study import LIMITS, learns, loss, make_cells, parse, tells, without

from analysis.norm_order import outcome
from analysis.norm_order.limits import GRID, cells_to_add, observations, place, read_limits
from analysis.norm_order.mechanism import CANDIDATES, LOSS
from analysis.norm_order.outcome import summarize
from analysis.norm_order.significance import holm, sign_test
from analysis.norm_order.study import RECORDS, StudyCell, read_groups
from analysis.norm_order.study_tests import compare_limits, read_outcomes, read_study


@pytest.fixture(scope="module")
def planted() -> pd.DataFrame:
    return make_cells()


@pytest.fixture(scope="module")
def found(planted) -> dict:
    return summarize(planted)["config"]


def decisions(config: dict) -> list[str]:
    return [row["decision"] for row in config["tests"]]


def test_planted_effects_are_found(planted, found) -> None:
    wanted = ["supported"] * 12
    wanted[2] = wanted[3] = "not supported"  # B2T and post-norm differ by less than the noise
    assert decisions(found) == wanted and found["stage"] == f"{len(planted)} of {len(planted)} runs are recorded"
    first, third, seventh, eighth = (found["tests"][test - 1] for test in (1, 3, 7, 8))
    assert first["effect"] == pytest.approx(-0.15, abs=0.02) and first["low"] < first["effect"] < first["high"] < 0
    assert (first["method"], first["n"]) == ("paired t", 8) and "post 8 of 8 learned" in first["note"]
    assert third["low"] < 0 < third["high"]  # the interval is there although the test does not reject
    assert seventh["effect"] == pytest.approx(-1) and seventh["n"] == 16 and "6, 12, 24, 48 layers" in seventh["note"]
    assert (eighth["n"], eighth["effect"], eighth["p"]) == (8, 1.0, 1 / 256)
    assert found["exponents"]["post"]["k"] == pytest.approx(1) and found["exponents"]["pre"]["k"] == pytest.approx(0)
    rates = {(row["family"], row["layers"], row["order"]): row["lr"] for row in found["rates"]}
    assert rates["bert", 12, "pre"] == rates["gpt", 12, "post"] == 0.003 and rates["bert", 24, "post"] == 0.0015
    limits = {(row["layers"], row["order"], row["warmup"]): row["limit"] for row in found["limits"]}
    assert limits[24, "post", 100] == 0.003 and limits[24, "post", 400] == 0.006 and limits[48, "post", 100] == 0.0015
    recovered = found["recovery"]
    assert recovered["b2t, 24 layers: recovers"] and recovered["b2t, 48 layers: learns at twice post-norm's limit"]
    assert recovered["b2t, 12 layers: recovers"] is False and recovered["warm-up of 400, 24 layers: recovers"]
    trivial = {layers: recovered[f"warm-up of 400, {layers} layers: 100 steps do so too"] for layers in (12, 24)}
    assert trivial == {12: True, 24: False} and found["tests"][11]["unit"] == "nats/token"
    assert set(found["refuted"].values()) == {False} and not found["cells_to_add"]


def test_no_effect_is_not_claimed() -> None:
    def alike(cell: StudyCell) -> bool:
        return cell.seed % 2 == 0 if cell.seed in range(201, 209) else learns(replace(cell, order="pre"))

    def noisy(cell: StudyCell) -> float:
        same = replace(cell, order="pre", lr=cell.lr if cell.seed in (101, 102) else "0.003")
        return loss(same) + np.random.default_rng([cell.seed, *cell.order.encode()]).normal(0, 0.01)

    cells = make_cells(learns=alike, loss=noisy, tells=lambda cell, stuck: tells(cell, False))
    config = summarize(cells)["config"]
    pairs = [config["tests"][test - 1].pop("decision") for test in (8, 10)]
    assert pairs == ["too few pairs"] * 2  # four of the eight cells are stuck
    assert {row.get("decision", "not supported") for row in config["tests"]} == {"not supported"}
    assert all(row["p"] is not None and row["p_holm"] > 0.05 for row in config["tests"])
    assert config["refuted"]["question 1"] and config["refuted"]["question 4"] and config["refuted"]["question 3"]
    assert config["refuted"]["question 2"] is False  # no difference is not the opposite one


def test_the_opposite_effect_is_told_and_refutes() -> None:
    turned = {"pre": 3.45, "post": 3.6}

    def swapped(cell: StudyCell) -> float:
        return loss(cell) + turned.get(cell.order, 0) - {"pre": 3.6, "post": 3.45}.get(cell.order, 0)

    config = summarize(make_cells(loss=swapped))["config"]
    assert [decisions(config)[test - 1] for test in (1, 2, 11, 12)] == ["the opposite is supported"] * 4
    assert decisions(config)[2] == "supported" and config["tests"][2]["effect"] < 0
    assert config["refuted"]["question 2"] and config["refuted"]["question 5"]


def test_a_seed_that_did_not_learn_takes_the_t_test_away() -> None:
    """Post-norm is lower with 5 seeds, stuck with 2; with 1 neither learns."""

    def some(cell: StudyCell) -> bool:
        neither = cell.seed == 18
        return (
            learns(cell) and not neither and not (cell.order == "post" and cell.layers == 12 and cell.seed in (11, 12))
        )

    config = summarize(make_cells(learns=some))["config"]
    first = config["tests"][0]
    assert (first["method"], first["n"], first["effect"]) == ("exact sign test", 7, 5 / 7)
    assert first["p"] == sign_test(5, 2) and first["decision"] == "not supported"
    assert first["note"] == "post 5 of 8 learned, pre 7 of 8 learned" and first["unit"] == "share of pairs"
    assert config["tests"][1]["n"] == 7 and config["tests"][1]["p"] == 2 / 2**7
    assert config["recovery"]["b2t, 12 layers: loss near post-norm's"]  # where post-norm learns
    assert config["refuted"]["question 2"] is False


def test_pairs_that_learn_in_mechanism_are_lost() -> None:
    config = summarize(make_cells(learns=lambda cell: learns(cell) or cell.seed == 201))["config"]
    tenth = config["tests"][9]
    assert (tenth["n"], tenth["p"]) == (7, 1 / 128)
    assert tenth["note"] == "7 of 8 stuck in mechanism, 7 of these learned in rescaled"


@pytest.mark.parametrize(
    "num_stuck, decision", [(0, "too few pairs"), (4, "too few pairs"), (5, "not supported"), (8, "supported")]
)
def test_too_few_stuck_pairs_support_nothing(planted, num_stuck: int, decision: str) -> None:
    cells = planted.copy()
    mechanism = cells.index[cells["group"] == "mechanism"]
    cells.loc[mechanism[num_stuck:], ["state", "train_loss"]] = "learned", 3.5
    eighth = summarize(cells)["config"]["tests"][7]
    assert (eighth["n"], eighth["decision"]) == (num_stuck, decision)
    assert (num_stuck < 5) == eighth["note"].endswith(f"; p cannot be below {0.5**num_stuck:.2g}")


def test_nothing_is_decided_by_a_test_that_may_still_reject(planted, found) -> None:
    config = summarize(without(planted, planted["group"] == "gpt"))["config"]
    wanted = [{"not supported": "not yet"}.get(decision, decision) for decision in decisions(found)]
    wanted[6] = wanted[8] = "not yet"  # computed anew with more depths
    wanted[11] = "not run"
    assert decisions(config) == wanted and config["tests"][6]["p"] < 0.004 and config["tests"][6]["p_holm"] == 1.0
    assert [config["refuted"][f"question {n}"] for n in (1, 4)] == [None, None]
    weak = without(planted, planted["group"] == "gpt")
    of_b2t = (weak["group"] == "losses") & (weak["order"] == "b2t")
    weak.loc[of_b2t, "train_loss"] = weak[of_b2t]["seed"].map(lambda seed: 3.6 + 0.2 * (seed % 2 - 0.5))
    config = summarize(weak)["config"]
    assert config["recovery"]["b2t, 24 layers: ends lower than pre-norm"] is None


def test_a_loss_near_post_norms_waits_for_post_norm(planted) -> None:
    post = (planted["group"] == "losses") & (planted["order"] == "post") & (planted["layers"] == 24)
    config = summarize(without(planted, post))["config"]
    assert config["recovery"]["b2t, 24 layers: loss near post-norm's"] is None
    assert config["recovery"]["b2t, 24 layers: recovers"] is config["refuted"]["question 3"] is None


def test_rounding_to_the_grid_is_no_faster_fall() -> None:
    """Both limits fall as depth^-0.5, from different values, and are rounded down to the grid."""
    places = {"post": {6: 5, 12: 5, 24: 4}, "pre": {6: 5, 12: 5, 24: 5}}
    rows = [
        {"layers": layers, "order": order, "warmup": 100, "family": "bert", "seeds": {1: at, 2: at}, "added": []}
        for order, limits in places.items()
        for layers, at in limits.items()
    ]
    result = compare_limits(pd.DataFrame(rows))
    assert result["effect"] == pytest.approx(-0.5) and result["note"].endswith("rounding to the grid can give -0.5")
    assert result["p"] < 0.05 and result["instead"] == {"supported": "within the grid's rounding"}
    rows += [rows[2] | {"layers": 48, "seeds": {1: 3, 2: 3}}, rows[5] | {"layers": 48}]
    result = compare_limits(pd.DataFrame(rows))
    assert result["note"].endswith("can give -0.4") and result["effect"] < -0.4 and "instead" not in result


def test_limits_beyond_the_grid_are_not_compared() -> None:
    config = summarize(make_cells(learns=lambda cell: cell.order not in ("post", "b2t") or cell.layers != 24))["config"]
    assert config["recovery"]["b2t, 24 layers: limit at least twice post-norm's"] is None
    config = summarize(make_cells(learns=lambda cell: True))["config"]
    assert config["recovery"]["warm-up of 400, 24 layers: recovers"] is None


@pytest.mark.parametrize(
    "group, tests", [("losses", {1, 2, 3, 4, 5, 6}), ("race", {11}), ("gpt", {12}), ("six", {7, 9})]
)
def test_a_group_without_all_its_records_is_not_run_and_has_p_one(planted, found, group, tests) -> None:
    of_group = planted["group"] == group
    for where in (of_group, of_group & (planted["seed"] == planted[of_group]["seed"].max())):
        config = summarize(without(planted, where))["config"]
        missing = {row["test"] for row in config["tests"] if row["decision"] == "not run"}
        assert missing == tests and all(config["tests"][test - 1]["p"] is None for test in tests)
        assert config["stage"].endswith(f"incomplete: {group}")
        adjusted = holm([1.0 if row["test"] in tests | {7, 9} else row["p"] for row in found["tests"]])
        for row, p_holm in zip(config["tests"], adjusted, strict=True):
            assert row["p_holm"] == (None if row["test"] in tests else p_holm)


def test_every_stage_has_a_summary_that_is_json(planted) -> None:
    groups = list(dict.fromkeys(name for name, _ in read_groups()))
    counts = []
    for number in range(0, len(groups) + 1, 3):
        cells = without(planted, ~planted["group"].isin(groups[:number]))
        config = summarize(cells)["config"]
        json.dumps(config, allow_nan=False)
        counts.append(decisions(config).count("not run"))
        if groups[:number][-1:] == ["losses"]:
            assert config["refuted"] == dict(zip(config["refuted"], (None, False, None, None, None), strict=True))
            assert config["recovery"]["b2t, 24 layers: recovers"] and config["mechanism"] is None
    assert counts[0] == 12 and counts == sorted(counts, reverse=True) and counts[-1] == 0


def test_the_deepest_model_enters_only_with_its_cells(planted) -> None:
    config = summarize(without(planted, planted["layers"] == 48))["config"]
    assert config["tests"][6]["n"] == 12 and config["exponents"]["b2t"]["layers"] == [6, 12, 24]
    assert config["recovery"]["b2t, 48 layers: learns at twice post-norm's limit"] is None
    assert config["mechanism"]["n"] < summarize(planted)["config"]["mechanism"]["n"]
    elsewhere = planted.assign(lr=planted["lr"].where(planted["group"] != "deep_b2t", 1.5e-3))
    recovered = summarize(elsewhere)["config"]["recovery"]
    assert recovered["b2t, 48 layers: learns at twice post-norm's limit"] is None  # that rate has not run


def test_a_limit_needs_every_lower_rate(planted) -> None:
    again = planted.copy()
    keys = (again["group"] == "selection") & (again["layers"] == 12) & (again["order"] == "pre")
    again.loc[keys & (again["lr"] == 1.5e-3) & (again["seed"] == 102), ["state", "train_loss"]] = "stuck", 4.74
    row = read_limits(again).query("layers == 12 and order == 'pre' and warmup == 100 and family == 'bert'").iloc[0]
    assert row["seeds"] == {101: place(6e-3), 102: place(0.75e-3)} and row["limit"] == place(0.75e-3)
    assert row["added"] == []  # the limit is known: the rate above it failed
    assert read_limits(planted)["added"].map(len).sum() == 0


def test_the_grid_is_extended_until_no_limit_or_best_rate_is_at_an_end() -> None:
    ceiling = {"pre": 8, "post": 1, "b2t": 4}
    cells = make_cells(learns=lambda cell: cell.seed > 200 or place(float(cell.lr)) <= ceiling.get(cell.order, 6))
    rates = cells[cells["seed"].isin([101, 102]) & (cells["warmup"] == 100) & (cells["family"] == "bert")]
    for layers in (6, 12, 24, 48):
        lists = rates[rates["layers"] == layers].groupby("order")["lr"]
        assert lists.max()["pre"] == GRID[8]
        # GRID[1] is the highest at which it learns; where rates are chosen, the best one is not at the end of its list.
        assert lists.min()["post"] == GRID[0 if layers in (12, 24) else 1]
    assert rates.groupby(["layers", "order", "lr"])["seed"].nunique().eq(2).all()
    config = summarize(cells)["config"]
    limits = {(row["layers"], row["order"], row["warmup"]): row for row in config["limits"]}
    assert limits[12, "pre", 100]["bound"] == "at least" and limits[12, "pre", 100]["final"]
    assert limits[48, "post", 100]["limit"] == GRID[1] and limits[48, "post", 100]["bound"] == ""
    assert "8 limits at an end of the grid" in config["tests"][6]["note"]


def test_added_cells_are_groups_for_the_file(planted) -> None:
    some = planted[~((planted["layers"] == 48) & (planted["order"] == "pre") & (planted["lr"] > 6e-3))]
    config = summarize(some)["config"]
    (text,) = config["cells_to_add"]
    assert text.split("\n")[1] == "    cells: {layers: [48], order: [pre], lr: [12e-3], seed: [101, 102]}"
    assert [cell.name for _, cell in parse(text)] == ["48_pre_0.012_w100_s101", "48_pre_0.012_w100_s102"]
    assert config["tests"][6]["n"] == 12  # without 48 layers, whose limit is not final
    gpt = planted["group"] == "gpt_selection"
    low = planted.assign(train_loss=planted["train_loss"].where(~(gpt & (planted["lr"] == 1.5e-3)), 3.0))
    texts = list(cells_to_add(read_limits(low)))
    assert len(texts) == 2 and all("family: [gpt], lr: [0.75e-3]" in text for text in texts)


def test_no_learned_seed_gives_a_limit_below_the_grid() -> None:
    cells = make_cells(learns=lambda cell: cell.order != "post" or cell.layers != 24)
    rows = observations(read_limits(cells), "post")
    assert set(rows[rows["layers"] == 24]["place"]) == {-1}
    limits = {(row["layers"], row["order"], row["warmup"]): row for row in summarize(cells)["config"]["limits"]}
    assert limits[24, "post", 100]["bound"] == "below" and limits[24, "post", 100]["limit"] == GRID[0]


def test_b2t_stuck_where_post_norm_learns_refutes_at_any_depth(planted) -> None:
    again = planted.copy()
    again.loc[again["id"] == "6_b2t_0.003_w100_s102", "state"] = "stuck"
    config = summarize(again)["config"]
    assert config["stuck_b2t"] == ["6_b2t_0.003_w100_s102"] and config["refuted"]["question 3"]


def test_records_are_read_into_planned_cells(tmp_path) -> None:
    cells = read_study(tmp_path)
    assert len(cells) == len(list(read_groups())) and cells["state"].isna().all()
    assert cells["lr"].isna().sum() == 48 + 8 + 8  # to be chosen
    cell = next(cell for group, cell in read_groups() if group == "selection")
    write_cell(tmp_path, cell.layers, cell.order, True, cell.lr, cell.seed, 3.5)
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    record["config"] |= {"curve": [5.0, 4.9, 4.8, 4.7, 3.5], "statistics": {"100": {n: [1.0, 3.0] for n in CANDIDATES}}}
    record["config"]["cell"] = vars(cell)
    path.write_text(json.dumps(record))
    row = read_study(tmp_path).set_index("id").loc[cell.name]
    assert (row["state"], row["train_loss"], row["variance_ratio/mlp"], row[LOSS]) == ("learned", 3.5, 2.0, 4.7)
    assert summarize(read_study(tmp_path))["config"]["groups"]["selection"]["recorded"] == 1
    record["config"]["cell"] = vars(replace(cell, lr="0.1"))
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="records of the study must be of its cells, but 12_pre_0.1_w100_s101 is not"):
        read_study(tmp_path)


def test_the_committed_outcome_matches_the_committed_cells() -> None:
    committed = json.loads((RECORDS.parent / "norm_order_study.json").read_text())
    again = summarize(read_study(RECORDS), read_outcomes(RECORDS.parent / "repeated"))
    assert (again["metrics"], again["config"]) == (committed["metrics"], committed["config"])


def test_the_limits_of_the_planted_study_are_those_of_its_cells(planted) -> None:
    for order, limits in LIMITS.items():
        rows = observations(read_limits(planted), order)
        limits = {layers: at for layers, at in limits.items() if (order, layers) != ("b2t", 48)}  # one rate, no limit
        assert rows.groupby("layers")["place"].agg(["min", "max"]).to_dict() == {"min": limits, "max": limits}


def test_the_script_prints_tests_and_writes_the_record(tmp_path, monkeypatch, capsys) -> None:
    record = tmp_path / "outcome.json"
    monkeypatch.setattr("sys.argv", ["outcome.py", "--records", str(tmp_path / "none"), "--record", str(record)])
    assert outcome.main() == 0
    printed = capsys.readouterr().out
    assert "no run is recorded" in printed and "  1 post-norm ends lower than pre-norm at 12 layers: not run" in printed
    assert json.loads(record.read_text())["config"]["stage"] == "no run is recorded"
