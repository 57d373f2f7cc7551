"""The forecast of the rows of `analysis/benchmarks/h200.sh`."""

import json

import pytest

from analysis.benchmarks import forecast
from lmscale.planner.memory import GIB


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(forecast.RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("card", ["h200", "h100"])
def test_every_timed_row_of_the_script_has_a_forecast_that_fits_the_device(card) -> None:
    record = json.loads(forecast.record_of(card).read_text(encoding="utf-8"))
    assert record["kind"] == "modelled"
    assert len(forecast.rows(card)) == {"h200": 27, "h100": 24}[card]  # gpt_8.3b and both float8 contenders do not fit
    for row in forecast.rows(card):
        assert row.plan.missing_bytes <= 0, row.name
        timed = ["step", "share_of_given_peak"] if row.prefix else []
        assert {name for name in record["metrics"] if name.startswith(row.name)} >= {
            f"{row.name}{metric}" for metric in (*timed, "memory_peak", "launches", "host_syncs")
        }


def test_the_goals_are_compared_after_each_change(record) -> None:
    for shares in record["config"]["goals"].values():
        after = [share for change, share in shares.items() if change != "goal"]
        assert after == sorted(after)  # each change is added to those before it


def test_a_row_that_was_run_is_put_beside_its_forecast(record, tmp_path) -> None:
    assert "no row was run yet" in forecast.compare(record, tmp_path)
    measured = 1.1 * record["metrics"]["gpt_1.2b/ours/step"]["value"]
    run = {"metrics": {"ours/step": {"value": measured, "unit": "s"}}}
    (tmp_path / "h200_gpt_1.2b.json").write_text(json.dumps(run), encoding="utf-8")
    lines = forecast.compare(record, tmp_path).splitlines()
    assert len(lines) == 2 and lines[1].split()[:2] == ["gpt_1.2b", "ours/step"] and lines[1].endswith("1.100")


def test_the_plan_is_compared_with_what_one_h200_has_shown() -> None:
    ratios = []
    for row in forecast.rows("h200"):
        path = forecast.RECORDS / f"{row.record}.json"
        if path.exists():
            measured = json.loads(path.read_text(encoding="utf-8"))["metrics"]
            peak = measured[f"{row.prefix}memory_peak"]["value"] * GIB
            assert peak == pytest.approx(row.plan.needed_bytes, rel=0.01), row.name
            ratios.append(measured[f"{row.prefix}step"]["value"] / row.plan.time.total)
    text = f"runs on one H200 took {min(ratios):.2f} to {max(ratios):.2f} times as long; "
    assert len(ratios) >= 5 and row.plan.cluster.calibration.expected_error.startswith(text)
