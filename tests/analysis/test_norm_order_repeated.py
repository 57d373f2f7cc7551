"""Cells of the second norm-order study on two CPU types, and repeats that bring a test's cells on one."""

import numpy as np
import pytest
from made_study import make_cells

from analysis.norm_order.outcome import summarize
from analysis.norm_order.repeated import describe_repeats


@pytest.fixture(scope="module")
def planted():
    """All cells of the study, of which B2T's at 12 layers ran on another CPU type than the others."""
    cells = make_cells()
    ours = (cells["group"] == "losses") & (cells["layers"] == 12) & (cells["order"] == "b2t")
    return cells.assign(cpu=cells["cpu"].where(~ours, "another CPU"))


def repeat(planted, cpu: str = "a CPU"):
    some = planted[planted["cpu"] == "another CPU"]
    return some.assign(cpu=cpu, train_loss=some["train_loss"] + np.array([0.004, *[-0.002] * 7]))


def test_a_test_over_two_cpu_types_says_so(planted) -> None:
    notes = [row["note"] for row in summarize(planted)["config"]["tests"]]
    assert [i for i, note in enumerate(notes, 1) if "; 8 pairs of two CPU types" in note] == [3, 5]
    assert summarize(planted)["config"]["cpus"] == {"a CPU": len(planted) - 8, "another CPU": 8}


def test_repeats_give_the_effect_on_one_cpu_type(planted) -> None:
    record = summarize(planted, repeat(planted))
    values = {name: entry["value"] for name, entry in record["metrics"].items()}
    assert (values["repeated/cells"], values["repeated/other_states"]) == (8, 0)
    assert values["repeated/largest_difference"] == pytest.approx(0.004)
    assert values["repeated/mean_difference"] == pytest.approx(-0.00125)
    for test in (3, 5):
        assert values[f"repeated/test {test}/effect"] == pytest.approx(values[f"test {test}/effect"] - 0.00125)
        assert values[f"repeated/test {test}/low"] != values[f"test {test}/low"]
    assert not any(f"repeated/test {test}/effect" in values for test in (1, 2, 4, 6, 11, 12))
    assert record["config"] == summarize(planted)["config"]  # they decide nothing


def test_one_cell_is_not_enough_for_a_test(planted) -> None:
    assert not any("test" in name for name in describe_repeats(planted, repeat(planted).iloc[:7]))
    assert describe_repeats(planted, repeat(planted).iloc[:0]) == {}


def test_a_repeat_that_learned_otherwise_is_counted_and_takes_signs(planted) -> None:
    again = repeat(planted)
    again.loc[again.index[0], ["state", "train_loss"]] = ["stuck", 4.74]
    found = describe_repeats(planted, again)
    assert found["repeated/other_states"]["value"] == 1
    assert found["repeated/test 5/effect"] == {"value": 7 / 8, "unit": "share of pairs"}


def test_a_repeat_on_the_same_cpu_type_is_refused(planted) -> None:
    with pytest.raises(ValueError, match="must have a record of another CPU type, but 12_b2t_0.003_w100_s11 has none"):
        describe_repeats(planted, repeat(planted, "another CPU"))
