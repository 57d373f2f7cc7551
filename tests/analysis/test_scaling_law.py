"""`sweep=scaling`, the study that runs it, and the laws and shifts computed from its runs."""

import itertools
import json
import math
import sys
from collections import defaultdict

import numpy as np
import pandas as pd
import pytest
import warm
from composed import composed_run
from entry_points import environment
from omegaconf import OmegaConf

from analysis.report.records import add_line, read_lines
from analysis.running import ROOT
from analysis.scaling_law import decide, figure, law, run, transfer
from analysis.scaling_law.cells import read_runs, tabulate
from lmscale.cli.conf_files import look_up

TRUTH = law.Surface(1.8, 400.0, 4000.0, 0.34, 0.37)
OURS = law.Surface(0.0, 109.4, 34.92, 0.449, 0.183)  # what the study's runs give
SIZES, TOKENS, NUM_SEEDS = (7e4, 2.4e5, 5e5, 8.7e5, 1.9e6), (2.5e5, 5e5, 1e6), 3
MINIATURE = ["tokenizer.vocab_size=300", "data.seq_length=8", "micro_batch_size=1", "global_batch_size=1"]
MINIATURE += ["trainer.num_validation_samples=4"]


def drawn(noise: float, seed: int = 0, truth: law.Surface = TRUTH) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs that follow a law, with noise in log L."""
    grid = np.array(list(itertools.product(SIZES, TOKENS, range(NUM_SEEDS))))
    losses = truth(grid[:, 0], grid[:, 1])
    return grid[:, 0], grid[:, 1], losses * np.exp(np.random.default_rng(seed).normal(0, noise, len(grid)))


def curve_cells(best: dict[tuple[str, int, int], float], seeds: tuple[int, ...] = (1, 2, 3)) -> pd.DataFrame:
    """Cells whose loss is a parabola over log2 of the rate, lowest at `best[parametrization, layers, width]`."""
    noise, rows = np.random.default_rng(0), []
    for (parametrization, layers, width), seed in itertools.product(best, seeds):
        offset = noise.normal(0, 0.05)
        for octave in range(-11, -4):
            loss = 4.0 + 0.05 * (octave - best[parametrization, layers, width] - offset) ** 2
            condition = ("gpt", "pre", False, parametrization, layers, width, 614400)
            rows.append((*condition, 2.0**octave, seed, loss, math.inf, layers * width**2))
    return pd.DataFrame(rows, columns=[*transfer.CONDITION, "lr", "seed", "loss", "unigram", "parameters"])


def test_a_law_without_noise_is_recovered_exactly() -> None:
    assert law.fit_surface(*drawn(0.0)) == pytest.approx(TRUTH, rel=1e-4)
    other = law.Surface(0.5, 30.0, 100.0, 0.7, 0.2)
    found = law.fit_surface(*drawn(0.0, truth=other))
    assert found == pytest.approx(other, rel=1e-3) and found.compute_exponent == pytest.approx(2 / 9, rel=1e-3)


def test_one_bad_run_does_not_move_the_law() -> None:
    n, d, losses = drawn(1e-4)
    losses[7] *= 1.2
    found = law.fit_surface(n, d, losses)
    assert found.alpha == pytest.approx(TRUTH.alpha, abs=0.01) and found.beta == pytest.approx(TRUTH.beta, abs=0.01)


def test_too_few_sizes_tokens_or_runs_are_refused() -> None:
    n, d, losses = drawn(0.0)
    for keep, what in ((n < 4e5, "3 sizes, but there are 2"), (d < 3e5, "3 numbers of tokens, but there are 1")):
        with pytest.raises(ValueError, match=what):
            law.fit_surface(n[keep], d[keep], losses[keep])


@pytest.mark.slow
def test_intervals_cover_the_law_as_often_as_they_say() -> None:
    """The numbers of results.md: 100 studies with the law and the noise of ours (0.0066)."""
    truth, covered, exponents = np.array([OURS.alpha, OURS.beta, OURS.compute_exponent]), np.zeros(3), []
    for seed in range(100):
        data = drawn(0.0066, seed, OURS)
        found = law.fit_surface(*data)
        low, high = law.intervals(found, *data, num_resamples=100).T
        covered += (low <= truth) & (truth <= high)
        exponents.append((found.alpha, found.beta, found.compute_exponent))
    assert covered.tolist() == pytest.approx([97, 93, 97], abs=1)
    assert np.mean(exponents, axis=0) - truth == pytest.approx([0.007, 0.022, 0.021], abs=0.002)
    assert np.std(exponents, axis=0) == pytest.approx([0.048, 0.032, 0.038], abs=0.002)


def test_lack_of_fit_is_one_for_the_law_and_large_for_another() -> None:
    data = drawn(0.003, seed=3)
    ratio, p = law.lack_of_fit(law.fit_surface(*data), *data)
    assert ratio < 3 and p > 0.05
    bent = (data[0], data[1], data[2] * (1 + 0.03 * (data[0] == SIZES[2])))
    ratio, p = law.lack_of_fit(law.fit_surface(*bent), *bent)
    assert ratio > 5 and p < 1e-3


def test_shifts_are_those_of_the_curves_and_the_base_stands_for_every_parametrization() -> None:
    best = {("standard", 4, 64): -8.0, ("standard", 4, 256): -9.4, ("mup", 4, 256): -7.9, ("completep", 16, 64): -8.2}
    table = transfer.transfer(curve_cells(best))["shift"].droplevel(["family", "norm_order", "qk_norm", "tokens"])
    assert table.to_dict() == {key: pytest.approx(best[key] + 8.0, abs=0.12) for key in list(best)[1:]}


def test_the_penalty_is_that_of_the_references_best_rate_on_the_grid() -> None:
    cells = curve_cells({("standard", 4, 64): -8.0, ("standard", 4, 256): -10.0})
    ((penalty, gain),) = transfer.transfer(cells)[["penalty", "gain"]].to_numpy()
    assert penalty == pytest.approx(0.05 * 2.0**2, abs=0.03)
    lowest = cells.groupby(["hidden_size", "lr"])["loss"].mean().groupby("hidden_size").min()
    assert gain == pytest.approx(lowest[64] - lowest[256])


def test_a_rate_at_which_a_seed_diverged_is_not_the_best() -> None:
    cells = curve_cells({("standard", 4, 64): -8.0, ("standard", 4, 256): -8.0})
    wide, best = cells["hidden_size"] == 256, cells["lr"] == 2.0**-8
    cells.loc[wide & best, "loss"] -= 1.0
    cells.loc[wide & best & (cells["seed"] == 1), "loss"] = math.nan
    assert set(decide.at_best_rate(cells[wide])["lr"]) <= {2.0**-9, 2.0**-7}
    assert decide.at_best_rate(cells[wide].assign(loss=math.nan)).empty
    table = transfer.transfer(cells.assign(loss=cells["loss"].mask(wide)))
    assert table[["shift", "penalty"]].isna().all(axis=None)


def test_a_size_with_fewer_seeds_is_compared_with_the_same_seeds() -> None:
    cells = curve_cells({("standard", 4, 64): -8.0, ("standard", 4, 256): -9.0})
    (shift,) = transfer.transfer(cells[(cells["hidden_size"] == 64) | (cells["seed"] < 3)])["shift"]
    assert shift == pytest.approx(-1.0, abs=0.12)


def test_a_best_rate_at_an_end_is_none() -> None:
    rates = 2.0 ** np.arange(-10, -6)
    assert math.isnan(transfer.vertex(rates, np.array([1.0, 2, 3, 4])))
    assert math.isnan(transfer.vertex(rates, np.array([4.0, 3, 2, 1])))
    assert math.isnan(transfer.vertex(rates, np.array([3.0, 2, math.nan, math.nan])))
    assert transfer.vertex(rates, np.array([3.0, 2, 3, 4])) == pytest.approx(-9.0)


def test_tests_wait_for_their_cells_and_then_decide() -> None:
    best = {("standard", 4, 64): -8.0, ("standard", 4, 256): -9.9, ("mup", 4, 256): -8.1}
    best |= {("standard", 16, 64): -7.9, ("completep", 16, 64): -9.5}
    cells = curve_cells(best)
    waiting = decide.decide(cells, {"width": True, "depth": False})
    assert [test["supported"] for test in waiting] == [True] * 3 + [False] * 3
    assert [test["decided"] for test in waiting] == [True] * 3 + [False] * 3
    decided = decide.decide(cells, {"width": True, "depth": True})
    assert [test["supported"] for test in decided] == [True] * 3 + [False] * 3  # completep moves, standard does not
    assert [test["refuted"] for test in decided] == [False] * 4 + [True] * 2
    assert decided[5]["contrast"] == pytest.approx(-1.6, abs=0.2)  # completep's shift of -1.5 minus standard's of 0.1
    assert "; the difference -1." in decide.outcome(decided[5]) and decided[2]["contrast_p"] < 0.01
    words = [decide.outcome(test).partition(" (")[0] for test in (*waiting, *decided[3:])]
    missing = "not decided: cells are missing, or a best rate is beyond the grid"
    assert words == ["supported"] * 3 + [missing] * 3 + ["not supported", "refuted", "refuted"]


def test_a_best_rate_beyond_the_grid_is_not_tested() -> None:
    best = {("standard", 4, 64): -8.0, ("standard", 4, 256): -11.5, ("mup", 4, 256): -8.1}
    tests = decide.decide(curve_cells(best), {"width": True, "depth": False})[:3]
    assert [test["decided"] for test in tests] == [False, True, False] and tests[1]["supported"]
    assert not tests[0]["supported"] and not tests[2]["refuted"]


def test_sensitivity_is_the_rise_above_the_lowest_mean_with_the_range_over_seeds() -> None:
    """Parabolas with their lowest loss at 2^-8; those above a unigram model count as that."""
    cells = curve_cells({("standard", 4, 64): -8.0})
    found = decide.sensitivity(cells).iloc[0]
    assert found["mean"] == pytest.approx(np.mean([0.05 * k**2 for k in range(-3, 4)]), abs=0.02)
    assert found["low"] < found["mean"] < found["high"] < found["mean"] + 0.05
    assert (found["below"], found["above"]) == (3.0, 3.0)
    capped = decide.sensitivity(cells.assign(unigram=4.1)).iloc[0]
    assert capped["mean"] == pytest.approx((0.05 * 2 + 0.1 * 4) / 7, abs=0.02)
    assert decide.sensitivity(cells[cells["lr"] > 2.0**-8]).empty  # the best is at an end


def test_the_limit_is_the_highest_rate_that_learns_and_falls_where_that_of_the_smallest_size_is_higher() -> None:
    """Parabolas that are 0.1 nats below a unigram model up to twice their best rate."""
    best = {("standard", 4, 64): -8.0, ("standard", 16, 64): -9.0, ("completep", 16, 64): -8.0, ("mup", 4, 256): -5.0}
    found = decide.limits(curve_cells(best).assign(unigram=4.2)).droplevel(
        ["family", "norm_order", "qk_norm", "tokens"]
    )
    assert found["low"].to_dict() == {key: 2.0 ** (rate + 1) for key, rate in list(best.items())[:3]}
    assert found["high"].equals(found["low"].rename("high"))  # and none beyond the grid
    assert found["fallen"].dropna().to_dict() == {("standard", 16, 64): 3, ("completep", 16, 64): 0}


def test_sizes_with_two_rates_have_no_shift() -> None:
    cells = curve_cells({("standard", 4, 64): -8.0, ("standard", 4, 128): -8.0, ("standard", 4, 256): -9.0})
    few = (cells["hidden_size"] == 64) & (cells["lr"] < 2.0**-6)
    assert list(transfer.transfer(cells[~few]).reset_index()["hidden_size"]) == [256]  # compared with 128
    assert decide.at_best_rate(cells[(cells["hidden_size"] == 64) & ~few]).empty


def test_shifts_stand_by_placement_and_size_with_the_range_over_their_seeds() -> None:
    best = {("mup", 4, 256): -8.1, ("completep", 16, 64): -8.2, ("standard", 4, 256): -9.0, ("standard", 4, 64): -8.0}
    cells = curve_cells(best)
    table = transfer.transfer(pd.concat([cells.assign(norm_order="post"), cells, cells.assign(family="bert")]))
    drawn_figure = figure.draw_shifts(table, "finding")
    (axis,) = drawn_figure.axes
    sizes = ("4 layers x 256, standard", "4 layers x 256, muP", "16 layers x 64, CompleteP")
    arms = ("GPT, pre-norm", "GPT, post-norm", "BERT, pre-norm")
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"{a}, {size}" for a in arms for size in sizes]
    places = axis.get_yticks()
    assert places[2] - places[3] > places[0] - places[1] > 0  # the groups stand apart
    (legend,) = drawn_figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["within one octave", "standard", "muP", "CompleteP"]
    ends = {
        round(x, 6)
        for bars in axis.containers
        for (start, end) in bars[2][0].get_segments()
        for x in (start[0], end[0])
    }
    assert ends == {round(x, 6) for x in table[["least", "most"]].to_numpy().flat}


def test_a_line_ends_where_a_seed_does_not_learn_and_the_unigram_has_a_name() -> None:
    cells = curve_cells({("standard", 4, 64): -8.0}).assign(unigram=4.4)
    cells.loc[(cells["lr"] == 2.0**-6) & (cells["seed"] == 2), "loss"] = math.nan
    placements = [cells.assign(norm_order=order, qk_norm=qk) for order in ("post", "pre") for qk in (False, True)]
    (axis,) = figure.draw_sensitivity(pd.concat(placements), "finding").axes
    names = [text.get_text() for text in axis.get_legend().get_texts()]
    assert names == ["pre-norm", "pre-norm, QK-norm", "post-norm", "post-norm, QK-norm", "unigram model"]
    line, points = axis.get_lines()[:2]
    assert np.isfinite(line.get_ydata()).tolist() == [False] + [True] * 4 + [False] * 2
    assert np.max(points.get_ydata()) == pytest.approx(4.4)


def test_the_figures_of_the_study_show_their_tables() -> None:
    cells = curve_cells({("standard", 4, 64): -8.0, ("standard", 4, 256): -9.0, ("mup", 4, 256): -8.1})
    n, d, losses = drawn(0.003)
    arm = dict(zip(decide.ARM, ("gpt", "pre", False, "mup"), strict=True))
    runs = pd.DataFrame(arm | {"parameters": n, "tokens": d, "loss": losses, "num_layers": 4, "hidden_size": n})
    runs = runs.assign(lr=0.008, without_embeddings=n / 2, flops=7 * n * d)
    (axis,) = figure.draw_law(runs, "finding").axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        *("0.25 M tokens", "0.50 M tokens", "1.00 M tokens")
    ]
    table = decide.laws(runs, num_resamples=20)
    record = decide.summarize(cells.assign(train_time=1.0), [pd.DataFrame()] * 3 + [table], defaultdict(bool))
    recorded = decide.recorded_laws(record)
    assert recorded.loc["FLOPs / 6 tokens"].to_dict() == pytest.approx(
        table.iloc[2].astype(float).to_dict(), nan_ok=True
    )
    assert table["exponent"].between(table["exponent_low"], table["exponent_high"]).all()


def test_the_committed_summary_follows_from_the_committed_runs() -> None:
    committed = json.loads(run.RECORDS.with_suffix(".json").read_text())
    cells, complete = tabulate(read_runs([run.RECORDS])), committed["config"]["complete"]
    assert complete == {group["name"]: run.is_complete(group, run.RECORDS) for group in run.read_groups()}
    of_law = cells[(cells["parametrization"] == "mup") & (cells["tokens"] != figure.STEPS_TOKENS)]
    law = decide.laws(of_law, num_resamples=2)[["alpha", "beta", "lack_of_fit"]]
    again = decide.summarize(
        cells, (transfer.transfer(cells), decide.sensitivity(cells), decide.limits(cells), law), complete
    )
    tests, expected_tests = (each["config"].pop("tests") for each in (again, committed))
    assert [each.keys() for each in tests] == [each.keys() for each in expected_tests]
    for found, expected in zip(tests, expected_tests, strict=True):  # last digits change with scipy and with the CPU
        numbers = {name: pytest.approx(each, rel=1e-9) for name, each in expected.items() if isinstance(each, float)}
        assert found == expected | numbers
    assert again["config"] == committed["config"]
    values, expected = (
        {name: each["metrics"][name]["value"] for name in again["metrics"]} for each in (again, committed)
    )
    assert values == {name: value and pytest.approx(value, rel=1e-6) for name, value in expected.items()}


def test_a_width_without_its_number_of_heads_is_refused() -> None:
    config = OmegaConf.create({"model": {"hidden_size": 64}})
    assert look_up("model.hidden_size", {32: 2, 64: 4}, _root_=config) == 4
    config.model.hidden_size = 50
    with pytest.raises(ValueError, match="`model.hidden_size` must be one of 32, 64, but is 50"):
        look_up("model.hidden_size", {32: 2, 64: 4}, _root_=config)


def test_planned_cells_have_the_folders_of_the_sweep() -> None:
    """Every cell of the study composes, and its ID is the folder that `sweep=scaling` gives it."""
    from hydra import compose, initialize_config_dir

    for group in run.read_groups():
        names = run.names_of(group["keys"])
        assert len(set(names)) == len(names)
        first = run.products(group["keys"])[0]
        words = [f"{key}={value}" for key, value in first.items()]
        config = composed_run("sweep=scaling", *words)
        assert config.model.parametrization == first["model.parametrization"]
        with initialize_config_dir(str(ROOT / "conf"), version_base=None):
            composed = compose("train", [*words, "sweep=scaling"], return_hydra_config=True)
            assert composed.hydra.sweep.subdir == names[0]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"norm_order": "post"}, "one norm_order, but they have pre, post"),
        ({"tokens": 5}, "one tokens, but they have 614400, 5"),
    ],
)
def test_a_figure_refuses_runs_that_it_cannot_tell_apart(changes: dict, rule: str) -> None:
    cells = curve_cells({("standard", 4, 64): -8.0, ("standard", 4, 256): -8.0})
    with pytest.raises(ValueError, match=rule):
        figure.check_one_panel(pd.concat([cells, cells.assign(**changes)]))
    with pytest.raises(ValueError, match="two sizes at least"):
        figure.check_one_panel(cells[cells["hidden_size"] == 64])


@pytest.mark.parametrize("path", ["rates.txt", "outputs", "/proc/none/rates.png"])
def test_a_figure_that_cannot_be_written_is_refused_first(path: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["decide.py", "--figure", path])
    with pytest.raises(SystemExit, match="2"):
        decide.main()
    assert capsys.readouterr().err.startswith("error: `--figure` must ")


@pytest.mark.parametrize("word", ["trainer.max_steps=4", "seed=5", "model.qk_norm=true"])
def test_keys_in_the_names_of_cells_are_refused_as_overrides(word: str, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--records", str(tmp_path / "c.jsonl"), "--", word])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert f"{word.partition('=')[0]} must be set in cells.yaml" in capsys.readouterr().err


def test_rates_are_added_beyond_an_end_until_the_best_is_inside(tmp_path, monkeypatch) -> None:
    """Losses are a parabola's, lowest at 0.001, below the planned rates; a seed overflows at 0.016."""
    records, swept = tmp_path / "cells.jsonl", []

    def train(script, *words, **options) -> None:
        (rates,) = (word.partition("=")[2].split(",") for word in words if word.startswith("optimizer.lr="))
        swept.append(rates)
        for name in run.names_of(keys | {run.RATE: rates}):
            rate, seed = (float(name.split("_")[place]) for place in (-3, -1))
            loss = None if (rate, seed) == (0.016, 1) else np.log2(rate / 0.001) ** 2
            add_line(records, name, {"metrics": {"loss": {"value": loss}}})

    monkeypatch.setattr(run, "run_python", train)
    group = next(group for group in run.read_groups() if group["name"] == "base")
    keys = group["keys"]
    run.run_group(group, (), tmp_path, records)
    assert swept == [["0.002", "0.004", "0.008", "0.016"], ["0.001"], ["0.0005"]]
    assert run.is_complete(group, records)
    run.run_group(group, (), tmp_path, records)
    assert len(swept) == 3 and len(read_lines(records)) == 6 * 3


def test_your_own_runs_are_read_from_their_folders_and_must_agree(tmp_path, monkeypatch, capsys) -> None:
    """Three short runs of a sweep; the same sweep once more trains nothing; another batch size is refused."""
    words = ["model.parametrization=mup", "model.hidden_size=32,64", "optimizer.lr=0.002", "seed=1"]
    words = [
        *words,
        *MINIATURE,
        "trainer.max_steps=3",
        "schedule.warmup_steps=1",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]
    for expected in (0, 2):
        done = warm.run(["src/train.py", "sweep=scaling", *words], ROOT, environment(), timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("nothing to do") == expected
    runs = read_runs([tmp_path / "sweep"])
    cells = tabulate(runs)
    assert list(cells["hidden_size"]) == [32, 64] and set(cells["tokens"]) == {24}
    assert (cells["parameters"] > cells["without_embeddings"]).all() and cells["loss"].between(5, 7).all()
    assert cells["unigram"].between(3, 7).all()
    monkeypatch.setattr(sys, "argv", ["decide.py", str(tmp_path / "sweep"), "--figure", str(tmp_path / "rates.png")])
    assert decide.main() == 0 and "the gain by the size\ntoo few runs" in capsys.readouterr().out  # one rate
    assert (tmp_path / "rates.png").stat().st_size > 10_000
    other = json.loads(json.dumps(runs))
    other["other"] = next(iter(runs.values())) | {
        "config": next(iter(runs.values()))["config"] | {"global_batch_size": 2}
    }
    with pytest.raises(ValueError, match="`global_batch_size` must be the same in all runs, but differs between"):
        tabulate(other)
    with pytest.raises(ValueError, match="must differ in size, rate or seed, but .* do not"):
        tabulate(runs | {"again": next(iter(runs.values()))})
    (folder,) = (tmp_path / "sweep").glob("*x32_*")
    record = json.loads((folder / "record.json").read_text())
    record["metrics"]["steps"]["value"] = 2
    (folder / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="a run must have ended, but .* was stopped after 2 of 3 steps"):
        read_runs([tmp_path / "sweep"])
    (folder / "record.json").unlink()
    assert len(read_runs([tmp_path / "sweep"])) == 1 and "has no record.json yet" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["decide.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="2"):
        decide.main()
    assert "but" in capsys.readouterr().err


def test_added_cells_are_decided_by_their_two_tests() -> None:
    best = {("standard", 4, 64): -7.0, ("standard, std 0.04", 4, 256): -8.0}
    deep = curve_cells({("completep", 32, 64): -7.2, ("standard", 32, 64): -7.8, ("completep", 4, 64): -7.0})
    cells = pd.concat([curve_cells(best, tuple(range(1, 11))).query("hidden_size == 64 or seed < 4"), deep])
    record = decide.decide_more(cells.reset_index(drop=True))
    moved = {name: entry["value"] for name, entry in record["metrics"].items() if name.endswith("/shift")}
    assert moved == pytest.approx(
        {"standard, std 0.04, 4 x 256/shift": -1.0, "completep, 32 x 64/shift": -0.2, "standard, 32 x 64/shift": -0.8},
        abs=0.15,
    )
    assert [test["p_holm"] < 0.05 for test in record["config"]["tests"]] == [True, True]
    assert record["metrics"]["spread of the base"]["value"] == pytest.approx(0.05, abs=0.03)
