"""Forecasts: of the rows of `h200.sh`, and of Figure 7 at its true widths, whose runs become records."""

import json
import re
import sys
from pathlib import Path

import pytest
from composed import composed_run

from analysis.benchmarks import forecast
from analysis.norm_order import true_widths
from analysis.norm_order.cells import STATES, read_cells, read_curves
from analysis.norm_order.figure import draw_true_widths
from lmscale.planner.memory import GIB


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(forecast.RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("card", ["h200", "h100"])
def test_every_timed_row_of_the_script_has_a_forecast_that_fits_the_device(card) -> None:
    record = json.loads(forecast.record_of(card).read_text(encoding="utf-8"))
    assert record["kind"] == "modelled"
    assert len(forecast.rows(card)) == {"h200": 29, "h100": 28}[card]  # gpt_8.3b does not fit
    for row in forecast.rows(card):
        assert row.plan.missing_bytes <= 0, row.name
        timed = ["step", "share_of_given_peak"] if row.prefix else []
        assert {name for name in record["metrics"] if name.startswith(row.name)} >= {
            f"{row.name}{metric}" for metric in (*timed, "memory_peak", "launches", "host_syncs")
        }


def test_the_goals_are_compared_after_each_change(record) -> None:
    for shares in record["config"]["goals"].values():
        after = [share for change, share in shares.items() if change not in ("goal", forecast.RECIPE)]
        assert after == sorted(after)  # each change is added to those before it
        assert shares[forecast.RECIPE] > after[-2]


def test_a_row_is_planned_as_its_command_says() -> None:
    words = (
        "bench.py model=bert_336m micro_batch_size=128 global_batch_size=1024 model.hidden_dropout=0 record=h200_x.json"
    )
    (row,) = forecast.rows_of([*words.split(), "model.attention_dropout=0", "model.attention=cudnn"], "h200")
    (flash,) = forecast.rows_of(words.split(), "h200")
    assert (row.name, row.plan.job.num_micro_batches(row.plan.layout)) == ("x/ours/", 8)
    config = row.plan.job.config
    assert (config.hidden_dropout, config.attention_dropout, flash.plan.job.config.attention_dropout) == (0, 0, 0.1)
    assert row.plan.cluster.roofline.attention_forward_tflops == 595 and row.plan.time.total < flash.plan.time.total
    assert {row.record for row in forecast.measured_rows()} >= {"h200_gpt_1.2b", "h200_gpt_1.2b_train"}


def test_a_row_that_was_run_is_put_beside_its_forecast(record, tmp_path) -> None:
    assert "no row was run yet" in forecast.compare(record, tmp_path)
    record = json.loads((forecast.RECORDS / "h200_forecast.json").read_text(encoding="utf-8"))
    measured = 1.1 * record["metrics"]["gpt_1.2b/ours/step"]["value"]
    run = {"metrics": {"ours/step": {"value": measured, "unit": "s"}}}
    (tmp_path / "h200_gpt_1.2b.json").write_text(json.dumps(run), encoding="utf-8")
    lines = forecast.compare(record, tmp_path).splitlines()
    assert len(lines) == 2 and lines[1].split()[:2] == ["gpt_1.2b", "ours/step"] and lines[1].endswith("1.100")


def test_the_plan_is_compared_with_what_one_h200_has_shown() -> None:
    for row in forecast.measured_rows("h200"):
        measured = json.loads((forecast.RECORDS / f"{row.record}.json").read_text(encoding="utf-8"))["metrics"]
        peak = measured[f"{row.prefix}memory_peak"]["value"] * GIB
        assert peak == pytest.approx(row.plan.needed_bytes, rel=0.01), row.name
        low, high = {"bf16": (0.95, 1.05), "fp8": (1.2, 1.22)}[row.plan.job.dtype]  # what is not explained, in float8
        assert low < measured[f"{row.prefix}step"]["value"] / row.plan.time.total < high, row.name
    fits = json.loads((forecast.RECORDS / "roofline.json").read_text(encoding="utf-8"))["metrics"]
    left_out = [
        1 + entry["value"] for name, entry in fits.items() if re.fullmatch("ours, fitted without it/[^/]*", name)
    ]
    gpt, bert, fp8 = (f"{ratio:.2f}" for ratio in left_out)
    text = f"each left out of the fit, took {gpt} and {bert} times as long in bf16 and {fp8} in float8; "
    assert row.plan.cluster.calibration.expected_error.startswith(f"runs on one H200, {text}")


ROOT = Path(true_widths.__file__).parents[2]
PART_LIMIT_S = 480  # of a run of list c, see tests/analysis/test_h200.py
TINY = ("model.hidden_size=16", "model.num_attention_heads=2", "data.seq_length=32", "model.max_position_embeddings=32")
COMMITTED = json.loads(true_widths.FORECAST.read_text(encoding="utf-8"))


def test_the_forecast_is_of_the_runs_that_the_script_starts() -> None:
    assert COMMITTED["kind"] == "modelled"
    found, forecast = true_widths.runs(), COMMITTED["config"]["runs"]
    assert list(found) == list(forecast) == list(true_widths.EXPECTED) == list(COMMITTED["config"]["expected"])
    for name, values in found.items():
        for key in ("model", "optimizer", "schedule", "precision", "data", "tokenizer", "micro_batch_size", "seed"):
            assert values[key] == forecast[name][key], (name, key)
        assert values["global_batch_size"] * values["data"]["seq_length"] == 16_384
        assert values["trainer"]["max_steps"] == forecast[name]["trainer"]["max_steps"] == 2_000
        assert f"{values['model']['name']}_{values['model']['norm_order']}" == name


def test_the_runs_fit_the_device_and_their_time_limit_by_the_forecast() -> None:
    figures = {name: entry["value"] for name, entry in COMMITTED["metrics"].items()}
    for cluster, usable_gib in (("h200", 137.8), ("h100", 77.1)):
        times = [figures[f"{cluster}/{name}/time"] for name in true_widths.EXPECTED]
        assert sum(times) == pytest.approx(60 * figures[f"{cluster}/time"]) and sum(times) < 25 * 60
        assert max(times) < PART_LIMIT_S
        assert all(figures[f"{cluster}/{name}/memory_peak"] < usable_gib for name in true_widths.EXPECTED)
    # keep_last=1: one checkpoint, and the one being written
    assert 2 * max(figures[f"{name}/checkpoint"] for name in true_widths.EXPECTED) < 64 * 2**30 / 1e9


def test_the_forecast_says_what_counts_as_learned_and_how_often_the_text_is_read() -> None:
    figures = {name: entry["value"] for name, entry in COMMITTED["metrics"].items()}
    assert figures["context_free_loss"] < figures["scored_entropy"]
    assert figures["passes"] == pytest.approx(2_000 * 32 / figures["training_sequences"])
    assert {entry["state"] for entry in COMMITTED["config"]["expected"].values()} <= set(STATES)


def make_run(folder: Path, model: str, order: str, layers: int, last_loss: float, num_steps: int = 60) -> Path:
    """The folder of a run whose loss goes from 8.0 to `last_loss`."""
    keys = ["experiment=fig7_h200", f"model={model}", f"model.norm_order={order}", f"model.num_layers={layers}", *TINY]
    run = composed_run(*keys, f"trainer.max_steps={num_steps}", run_dir=folder)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(run.to_dict()), encoding="utf-8")
    rows = ["step,train/lm_loss,grad_norm,grad_norm/layer_0,time/step_s,memory_gib,val/lm_loss"]
    rows += [
        f"{step},{last_loss if step > 9 else 8.0},1.0,0.5,{0.2 if step > 9 else 9.0},37.5," for step in range(1, 60)
    ]
    rows += [f"60,{last_loss},1.0,0.5,0.2,37.5,{last_loss}"]
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    ended = {"metrics": {"val/lm_loss": {"value": last_loss, "unit": "nats/token"}}, "layout": {"tp_size": 1}}
    ended |= {"environment": {"device": "NVIDIA H200"}, "kernels": {"compiles": True}}
    (folder / "record.json").write_text(json.dumps(ended), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_runs_that_have_ended_become_records_a_comparison_and_a_figure(tmp_path) -> None:
    sizes = {"bert_336m": 2, "bert_752m": 3}
    losses = {"bert_336m_pre": 4.0, "bert_336m_post": 4.2, "bert_752m_pre": 4.1, "bert_752m_post": 5.85}
    folders = {name: name.rsplit("_", 1) for name in losses}
    records = [
        true_widths.keep(make_run(tmp_path / name, model, order, sizes[model], losses[name]))
        for name, (model, order) in folders.items()
    ]
    cells = read_cells(records)
    assert list(cells["state"]) == ["learned", "learned", "learned", "stuck"]
    assert records[0]["metrics"]["step"] == {"value": 0.2, "unit": "s"} and records[0]["kind"] == "scaled_down"
    assert records[0]["environment"] == {"device": "NVIDIA H200"} and records[0]["kernels"] == {"compiles": True}
    lines = true_widths.compare(COMMITTED, records).splitlines()
    assert len(lines) == 4 and "stuck (expected: stuck), step 0.2 s (forecast for h200: 0.1837)" in lines[3]
    figure = draw_true_widths(read_curves(records), cells)
    assert [axis.get_title() for axis in figure.axes] == ["2 layers", "3 layers"]
    drawn = [sorted(line.get_ydata()[-1] for line in axis.lines if len(line.get_xdata()) == 2) for axis in figure.axes]
    assert {losses["bert_336m_pre"], losses["bert_336m_post"]} < set(drawn[0])
    assert {losses["bert_752m_pre"], losses["bert_752m_post"]} < set(drawn[1])


@pytest.mark.slow
def test_a_run_that_diverged_has_a_record_and_one_that_was_stopped_has_none(tmp_path, monkeypatch, capsys) -> None:
    diverged = make_run(tmp_path / "diverged", "bert_752m", "post", 2, 5.0, num_steps=2_000)
    (diverged / "record.json").unlink()
    (diverged / "not_finite_step_60.json").write_text("[]", encoding="utf-8")
    assert list(read_cells([true_widths.keep(diverged)])["state"]) == ["diverged"]
    stopped = make_run(tmp_path / "stopped", "bert_752m", "post", 2, 5.0, num_steps=2_000)
    for folder, message in ((stopped, "must have ended after 2000 steps, but "), (tmp_path / "no_run", "must exist")):
        monkeypatch.setattr(sys, "argv", ["true_widths.py", "keep", str(folder), str(tmp_path / "record.json")])
        with pytest.raises(SystemExit, match="2"):
            true_widths.main()
        error = capsys.readouterr().err.splitlines()[-1]
        assert "error: " in error and message in error
    assert not (tmp_path / "record.json").exists()


def test_only_records_of_the_runs_are_compared(monkeypatch, capsys) -> None:
    for path in (true_widths.FORECAST, Path(__file__)):
        monkeypatch.setattr(sys, "argv", ["true_widths.py", "compare", str(path)])
        with pytest.raises(SystemExit, match="2"):
            true_widths.main()
        assert f"but {path} is not one" in capsys.readouterr().err
