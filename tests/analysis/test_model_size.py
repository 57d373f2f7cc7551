"""`sweep=model_size`, the scripts that run its cells and fit power laws to them, and their figures."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import warm
from composed import composed_run
from entry_points import environment
from omegaconf import OmegaConf

from analysis.model_size import decide
from analysis.model_size import run as model_size
from analysis.model_size.figure import draw_laws, draw_model_sizes
from analysis.report.records import add_line, read_lines
from analysis.report.style import PAGE_WIDTH
from lmscale.cli.conf_files import look_up

ROOT = Path(__file__).resolve().parents[2]
MINIATURE = ["tokenizer.vocab_size=400", "data.seq_length=16", "micro_batch_size=2", "global_batch_size=4"]
MINIATURE += ["trainer.max_steps=4", "schedule.warmup_steps=1", "trainer.validate_every_steps=2"]
MINIATURE += ["trainer.num_validation_samples=4"]
X = np.array([3e4, 1e5, 2.5e5, 7e5, 1.5e6, 3e6])


def run_main(monkeypatch, script, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, arguments)])
    return script.main()


@pytest.fixture
def trained(monkeypatch) -> list[list[str]]:
    """Run the entry point in forked processes; returns the overrides of every started run."""
    started = []

    def train(overrides) -> None:
        started.append(list(overrides))
        done = warm.run([str(ROOT / "src" / "train.py"), *overrides], ROOT, environment(), timeout=300)
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr(model_size, "train", train)
    return started


def test_every_cell_of_the_sweep_composes_with_a_different_size() -> None:
    shapes = set()
    for size in model_size.swept("model.hidden_size"):
        run = composed_run("sweep=model_size", f"model.hidden_size={size}", "seed=2")
        config = run.model.resolve(512)
        assert (config.family, config.hidden_size, run.seed, config.padded_vocab_size) == ("gpt", size, 2, 512)
        shapes.add((config.num_layers, run.trainer.max_steps * run.global_batch_size * run.data.seq_length))
    assert len(shapes) >= 5 and len({tokens for _, tokens in shapes}) == 1
    assert len(model_size.swept("seed")) == 3


def test_a_width_without_a_depth_is_refused() -> None:
    config = OmegaConf.create({"model": {"hidden_size": 48}})
    assert look_up("model.hidden_size", {32: 2, 48: 3}, _root_=config) == 3
    config.model.hidden_size = 50
    with pytest.raises(ValueError, match="`model.hidden_size` must be one of 32, 48, but is 50"):
        look_up("model.hidden_size", {32: 2, 48: 3}, _root_=config)


@pytest.mark.slow
def test_a_miniature_runs_and_finished_cells_are_not_repeated(tmp_path, monkeypatch, trained, capsys) -> None:
    records, outputs = tmp_path / "cells.jsonl", tmp_path / "outputs"
    where = ("--records", records, "--outputs", outputs, "--sizes", 32, 48, 64)
    (outputs / "hidden_48_seed_1").mkdir(parents=True)
    (outputs / "hidden_48_seed_1" / "metrics.csv").write_text("step\n")  # from a killed cell
    assert run_main(monkeypatch, model_size, *where, "--seeds", 1, "--", *MINIATURE) == 0
    assert run_main(monkeypatch, decide, "--records", records) == 2  # one seed is not enough for a fit
    assert capsys.readouterr().err == "error: each size must have at least 2 runs, but 25472 has 1\n"
    kept = read_lines(records)["hidden_32_seed_1"]
    assert run_main(monkeypatch, model_size, *where, "--seeds", 1, 2, "--", *MINIATURE) == 0
    cells = [[int(o.split("=")[1]) for o in overrides[2:4]] for overrides in trained]
    assert cells == [[32, 1], [48, 1], [64, 1], [32, 2], [48, 2], [64, 2]]
    cell = read_lines(records)["hidden_32_seed_1"]
    assert cell == kept and cell["kind"] == "scaled_down" and cell["layout"]["threads_per_rank"] == 1
    assert [point["step"] for point in cell["config"]["curve"]] == [2, 4]
    assert cell["config"]["curve"][-1]["loss"] == cell["metrics"]["val/loss"]["value"]
    assert cell["metrics"]["parameters_without_embeddings"]["value"] == 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert cell["metrics"]["tokens"]["value"] == 4 * 4 * 16
    assert run_main(monkeypatch, decide, "--records", records) == 0
    summary = json.loads((tmp_path / "cells.json").read_text())
    assert list(summary["config"]["curves"]) == ["2x32", "3x48", "4x64"] and summary["config"]["seeds"] == [1, 2]
    losses = [read_lines(records)[f"hidden_48_seed_{seed}"]["metrics"]["val/loss"]["value"] for seed in (1, 2)]
    assert summary["metrics"]["3x48/loss"]["value"] == pytest.approx(sum(losses) / 2)


def test_the_committed_summary_matches_the_committed_cells() -> None:
    committed = json.loads(decide.RECORDS.with_suffix(".json").read_text())
    again = decide.summarize(decide.by_size(read_lines(decide.RECORDS).values()))
    assert again["config"] == committed["config"]
    values = ({name: entry["value"] for name, entry in record["metrics"].items()} for record in (again, committed))
    assert next(values) == pytest.approx(next(values), rel=1e-9)


def make_series(sizes=(32, 48, 64, 96, 128, 192), steps: int = 100) -> list[dict]:
    """Records that follow a known power law in the parameters without embeddings."""
    records = []
    for layers, hidden in enumerate(sizes, start=2):
        count = layers * 12 * hidden**2
        for seed in (1, 2, 3):
            loss = 20 * count**-0.25 * (1 + 0.002 * (seed - 2))
            config = {"model": {"num_layers": layers, "hidden_size": hidden, "gelu": None}, "name": f"{hidden}"}
            config |= {"overrides": [f"seed={seed}"], "trainer": {"max_steps": steps}}
            config["curve"] = [{"step": steps // 2, "loss": loss + 1}, {"step": steps, "loss": loss}]
            values = {"val/loss": loss, "flops": 6e5 * count, "cpu_time": 10.0, "tokens": 1e5}
            values |= {"parameters_without_embeddings": count, "parameters": count + 640 * hidden}
            metrics = {name: {"value": value, "unit": "any"} for name, value in values.items()}
            records.append({"config": config, "metrics": metrics, "seed": seed, "name": f"{hidden}_{seed}"})
    return records


def test_a_known_law_is_recovered() -> None:
    value = {name: entry["value"] for name, entry in decide.summarize(decide.by_size(make_series()))["metrics"].items()}
    assert value["parameters_without_embeddings/plain/b"] == pytest.approx(0.25, abs=1e-3)
    assert value["flops/plain/b"] == pytest.approx(0.25, abs=1e-3)  # FLOPs are proportional to parameters here
    assert value["flops/plain/b_seeds_low"] < 0.25 < value["flops/plain/b_seeds_high"]
    law = decide.fit_power_law(X, [[7 * x**-0.3] * 2 for x in X])
    ends = [law[f"b_{end}"] for end in ("low", "high", "seeds_low", "seeds_high")]
    assert (law["a"], law["b"], law["r_squared"]) == pytest.approx((7, 0.3, 1)) and ends == pytest.approx([0.3] * 4)


def test_a_wrong_form_is_detected_by_the_lack_of_fit_test() -> None:
    noise = np.exp(0.002 * np.random.default_rng(4).normal(size=(len(X), 3)))
    bent = 7 * X**-0.3 * np.exp(-0.02 * np.log(X / X[0]) ** 2)
    law = decide.fit_power_law(X, bent[:, None] * noise)
    widths = [law[f"{name}_high"] - law[f"{name}_low"] for name in ("b_seeds", "b")]
    assert law["lack_of_fit"] > 10 and widths[1] > 2 * widths[0] and law["r_squared"] > 0.95


def test_too_few_sizes_are_refused_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    for record in make_series(sizes=(32, 48)):
        add_line(tmp_path / "cells.jsonl", record["name"], record)
    assert run_main(monkeypatch, decide, "--records", tmp_path / "cells.jsonl") == 2
    assert capsys.readouterr().err == "error: a power law needs at least 3 sizes, but there are 2\n"
    assert not (tmp_path / "cells.json").exists()


def test_cells_with_different_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="`trainer` must be the same in all cells, but is not in 96_1"):
        decide.by_size([*make_series(sizes=(32, 48, 64)), *make_series(sizes=(96,), steps=101)])


def test_a_curve_has_at_most_20_points_and_always_the_last(tmp_path) -> None:
    rows = [f"{step},{'' if step % 3 else step / 10}" for step in range(1, 100)]
    (tmp_path / "metrics.csv").write_text("\n".join(["step,val/loss", *rows]) + "\n")
    curve = model_size.read_curve(tmp_path / "metrics.csv")
    assert len(curve) == 17 and curve[-1] == {"step": 99, "loss": 9.9} and curve[0]["step"] == 3


def test_the_figures_show_the_records_with_units_at_page_width() -> None:
    record = decide.summarize(decide.by_size(make_series()))
    laws, curves = draw_laws(record), draw_model_sizes(record)
    for figure in (laws, curves):
        assert figure.get_figwidth() == PAGE_WIDTH
        for axis in figure.axes:
            legend = axis.get_legend().get_texts() if axis.get_legend() else axis.texts
            texts = [axis.xaxis.label, *axis.get_xticklabels(), *legend]
            assert legend and min(text.get_fontsize() for text in texts) >= 8
    assert {(a.get_xscale(), a.get_yscale()) for a in laws.axes} == {("log", "log")}
    assert laws.axes[0].get_ylabel() == "validation loss (nats/token)"
    points = laws.axes[0].containers[0].lines[0]
    assert list(points.get_ydata()) == [record["metrics"][f"{n}/loss"]["value"] for n in record["config"]["curves"]]
    assert len([line for line in curves.axes[0].get_lines() if len(line.get_xdata())]) == 6
    plt.close("all")
