"""The norm-order study: its cells, what it chooses and concludes from known numbers, and a miniature of it."""

import collections
import importlib.util
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lmscale.data.bert_dataset import IGNORE_LABEL, BERTDataset
from lmscale.data.prepare import prepare_corpus
from lmscale.data_config import DataConfig, TokenizerConfig
from lmscale.report.figures.norm_order import draw_failures, draw_gradient_norms, draw_loss_curves, draw_rates
from lmscale.report.norm_order import (
    NATS,
    choose_rates,
    read_cells,
    read_curves,
    read_gradient_norms,
    retried_cells,
)
from lmscale.report.norm_order_summary import (
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
from lmscale.results import new_record, write_record

SCRIPT = Path(__file__).parents[2] / "analysis" / "norm_order.py"
SWEEP = SCRIPT.parents[1] / "conf" / "sweep" / "norm_order.yaml"
RATES = ("1e-3", "3e-3")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("norm_order_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_cell(folder: Path, layers: int, order: str, scaled: bool, lr: str, seed: int, loss: float, **metrics) -> None:
    """A record as the script writes it, with a loss of our choice."""
    values = {"train_loss": loss, "lowest_loss": loss, "validation_loss": loss}
    values |= {"context_free_loss": 6.0, "scored_entropy": 6.5}
    values |= {"non_finite": 0, "cpu_time": 2.0} | metrics
    entries = {name: {"value": value, "unit": NATS} for name, value in values.items()}
    cell = {"layers": layers, "order": order, "scaled": scaled, "lr": lr, "seed": seed}
    norms = {"embedding": 1.0, "output": 1.0} | {f"layer_{i}": 0.1 * (i + 1) for i in range(layers)}
    config = {"cell": cell, "window": 25, "curve": [5.0, loss], "gradient_norms": {"1": norms, "50": norms}}
    config["sweep"] = OmegaConf.to_container(OmegaConf.load(SWEEP), resolve=False)
    record = new_record("norm_order_cell", "scaled_down", config, seed, entries)
    write_record(record, folder / f"{layers}_{order}_{scaled}_{lr}_{seed}.json")


def records_of(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.fixture
def study(tmp_path) -> Path:
    """Two depths: pre-norm better by 0.5 with an effect of the seed that both share; 3e-3 the better rate."""
    for order, scaled, seed in itertools.product(("pre", "post"), (True, False), (1, 2, 3)):
        loss = 4.0 + 0.1 * seed + (0.5 + 0.01 * (seed - 2)) * (order == "post") + 0.2 * (not scaled)
        for lr in RATES:
            write_cell(tmp_path, 4, order, scaled, lr, seed, loss + 0.3 * (lr == "1e-3"))
        write_cell(tmp_path, 8, order, scaled, "3e-3", seed, loss + 0.1)
    return tmp_path


def test_differences_are_paired_by_seed_and_have_students_interval(study) -> None:
    rows = order_differences(read_cells(records_of(study)), 4)
    assert list(zip(rows["layers"], rows["scaled"], strict=True)) == [(4, False), (4, True), (8, False), (8, True)]
    assert list(rows["difference"]) == pytest.approx([0.5] * 4)
    assert list(rows["half_width"]) == pytest.approx([4.303 * 0.01 / 3**0.5] * 4)  # the seeds' own 0.1 is gone
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
def test_a_cell_is_what_the_stated_rules_say(tmp_path, metrics, state) -> None:
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
def test_a_run_that_did_not_learn_has_no_end_to_compare(study, metrics) -> None:
    write_cell(study, 8, "post", True, "3e-3", 2, **metrics)
    cells = read_cells(records_of(study))
    record = summarize(cells, 4)
    assert "8_layers/scaled/difference" not in record["metrics"] and "8_layers/scaled/post" not in record["metrics"]
    assert record["metrics"]["8_layers/scaled/pre"]["value"] == pytest.approx(4.3)
    assert "8_layers/post/unscaled_minus_scaled" not in record["metrics"]
    row = order_table(order_differences(cells, 4)).iloc[3]
    assert (row["post-norm (lr)"], row["post - pre, 95 %"]) == ("- (0.003)", "")
    assert row["post-norm runs"] == f"2 learned, 1 {'diverged' if 'non_finite' in metrics else 'stuck'}"


def test_the_scaling_may_do_more_for_one_order(study) -> None:
    for seed in (1, 2, 3):
        write_cell(study, 4, "post", False, "3e-3", seed, 4.8 + 0.15 * seed)
    mean, half_width = interaction(read_cells(records_of(study)), 4)
    assert mean == pytest.approx(-0.2) and half_width == pytest.approx(4.303 * 0.04 / 3**0.5)


def test_seeds_of_one_order_alone_are_no_pairs(study) -> None:
    for path in [*study.glob("8_post_True_3e-3_1*"), *study.glob("8_pre_True_3e-3_[23]*")]:
        path.unlink()
    row = order_differences(read_cells(records_of(study)), 4).iloc[3]
    assert row["seeds"] == 0 and math.isnan(row["difference"])


def test_a_run_that_comes_back_was_unstable_all_the_same(study) -> None:
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


def test_the_orders_are_compared_at_equal_rates_too(study) -> None:
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
def test_a_study_without_an_arm_or_with_a_hole_has_no_summary(study, pattern: str) -> None:
    for path in study.glob(pattern):
        path.unlink()
    with pytest.raises(ValueError, match="must have all cells at 4 layers"):
        summarize(read_cells(records_of(study)), 4)


def test_two_records_of_one_cell_are_refused(study) -> None:
    (path,) = study.glob("8_pre_True_3e-3_1.json")
    path.with_name("again.json").write_text(path.read_text())
    with pytest.raises(ValueError, match="a cell must have one record, but .*'layers': 8.* has two"):
        read_cells(records_of(study))


def test_records_of_anything_else_are_refused_with_their_file(script, study) -> None:
    assert len(script.read_folder(study)) == 36
    path = study / "8_pre_True_3e-3_1.json"
    path.write_text(path.read_text().replace('"hidden_size": 64', '"hidden_size": 128'))
    with pytest.raises(ValueError, match="must hold cells of this sweep, but .*8_pre_True_3e-3_1.json is of another"):
        script.read_folder(study)
    for torn in ("{", '{"config": {}}', "[]"):
        path.write_text(torn)
        with pytest.raises(ValueError, match="must hold cells of this study, but .*8_pre_True_3e-3_1.json is none"):
            script.read_folder(study)


def test_the_committed_summary_is_that_of_the_committed_cells(script) -> None:
    folder = SCRIPT.parent / "results" / "norm_order"
    committed = json.loads(folder.with_suffix(".json").read_text())
    assert summarize(read_cells(script.read_folder(folder)), script.FACTORIAL)["metrics"] == committed["metrics"]


def test_the_reference_losses_are_those_of_the_scored_tokens(script) -> None:
    """Against the counts of what is shown and scored at the same place, taken from another seed's samples."""
    with initialize_config_dir(str(SCRIPT.parents[1] / "conf"), version_base=None):
        config = OmegaConf.to_container(compose("train", ["sweep=norm_order"]), resolve=True)
    found = script.reference_losses(config)
    data, tokenizer = DataConfig(**config["data"]), TokenizerConfig(**config["tokenizer"])
    corpus = prepare_corpus(data, tokenizer, "bert", None)
    dataset = BERTDataset(corpus, corpus.parts["train"][0], data, 5, "train")
    pairs = collections.Counter()
    for epoch in range(3):
        samples = dataset.batch(np.full(len(dataset), epoch), np.arange(len(dataset)))
        at = samples["labels"] != IGNORE_LABEL
        pairs.update(zip(samples["tokens"][at].tolist(), samples["labels"][at].tolist(), strict=True))
    total, mask = sum(pairs.values()), dataset.special["[MASK]"]
    scored, shown = collections.Counter(), collections.Counter()
    for (one, other), count in pairs.items():
        shown[one] += count
        scored[other] += count / total

    def chance(one: int, other: int) -> float:  # of what is scored where `one` is shown
        if one == mask:
            return scored[other]
        same = pairs[one, one] / shown[one]
        return same if one == other else (1 - same) * scored[other] / (1 - scored[one])

    entropy = -sum(share * math.log(share) for share in scored.values())
    least = -sum(count / total * math.log(chance(*pair)) for pair, count in pairs.items())
    assert found["scored_entropy"] == pytest.approx(entropy, abs=0.01)
    assert found["context_free_loss"] == pytest.approx(least, abs=0.01)


def test_the_figures_have_a_panel_a_depth_and_units(study) -> None:
    cells = read_cells(records_of(study))
    curves = draw_loss_curves(read_curves(records_of(study)), cells, 4)
    norms = draw_gradient_norms(read_gradient_norms(records_of(study)), cells, 4)
    failures = draw_failures(read_gradient_norms(records_of(study)), cells, 4, (1, 50))
    assert [len(figure.axes) for figure in (curves, norms, draw_rates(cells, 4), failures)] == [2, 2, 2, 2]
    assert all(figure.get_size_inches()[0] < 4.5 for figure in (curves, norms, failures))  # a column's width
    assert NATS in curves.axes[0].get_ylabel() and norms.axes[0].get_yscale() == "log"
    assert len(norms.axes[1].lines[0].get_xdata()) == 8


def test_the_factorial_comes_first_and_chooses_the_rates_of_other_depths(script, tmp_path) -> None:
    cells = script.cells_of_stage(script.FACTORIAL, script.SEEDS, tmp_path)
    assert len(cells) == 2 * 2 * 3 * 3 and [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    with pytest.raises(ValueError, match="must all be there first, but 12_pre_scaled_1.5e-3_1 is not"):
        script.cells_of_stage(24, script.SEEDS, tmp_path)
    for cell in cells:
        write_cell(tmp_path, cell.layers, cell.order, cell.scaled, cell.lr, cell.seed, 4.0 + (cell.lr != "3e-3"))
        (tmp_path / f"{cell.layers}_{cell.order}_{cell.scaled}_{cell.lr}_{cell.seed}.json").rename(
            tmp_path / f"{cell.name}.json"
        )
    assert {cell.lr for cell in script.cells_of_stage(24, script.SEEDS, tmp_path)} == {"3e-3"}
    assert len(script.cells_of_stage(24, script.SEEDS, tmp_path)) == 12
    assert [cell.seed for cell in script.cells_of_stage(48, script.SEEDS, tmp_path)] == [1] * 4


def test_seeds_that_did_not_learn_are_tried_at_the_lower_rates(script, tmp_path) -> None:
    def write(cell, loss: float) -> None:
        write_cell(tmp_path, cell.layers, cell.order, cell.scaled, cell.lr, cell.seed, loss)

    for cell in script.cells_of_stage(script.FACTORIAL, script.SEEDS, tmp_path):
        write(cell, 4.0 + (cell.lr != "3e-3"))
        path = tmp_path / f"{cell.layers}_{cell.order}_{cell.scaled}_{cell.lr}_{cell.seed}.json"
        path.rename(tmp_path / f"{cell.name}.json")
    assert script.cells_to_retry(tmp_path) == []
    for cell in script.cells_of_stage(24, script.SEEDS, tmp_path):
        write(cell, 5.95 if (cell.order, cell.scaled) == ("post", True) and cell.seed != 2 else 4.0)
    retries = script.cells_to_retry(tmp_path)
    assert [cell.name for cell in retries] == ["24_post_scaled_1.5e-3_1", "24_post_scaled_1.5e-3_3"]
    before = order_differences(read_cells(records_of(tmp_path)), 12)
    write(retries[0], 4.2)
    assert script.cells_to_retry(tmp_path) == retries  # one that has a record is not run again
    found = read_cells(records_of(tmp_path))
    assert order_differences(found, 12).equals(before) and len(retried_cells(found, 12)) == 1
    assert summarize(found, 12)["metrics"]["24_layers/post_scaled/lr_0.0015/seed_1"]["value"] == 4.2


def test_a_cell_is_trained_once_and_its_record_has_curve_and_gradients(script, tmp_path, capfd) -> None:
    (tmp_path / "outputs").mkdir()
    cell = script.Cell(2, "post", False, "6e-3", 5)
    more = ["trainer.max_steps=30", "trainer.validate_every_steps=15", "schedule.warmup_steps=2", "micro_batch_size=16"]
    more += ["global_batch_size=16"]
    script.run_cell(cell, more, tmp_path / "outputs", tmp_path / "records")
    record = json.loads((tmp_path / "records" / "2_post_unscaled_6e-3_5.json").read_text())
    assert record["metrics"]["steps"]["value"] == 30 and len(record["config"]["curve"]) == 1
    least, entropy = (record["metrics"][name]["value"] for name in ("context_free_loss", "scored_entropy"))
    assert 4.2 < least < 4.5 < entropy < 4.9
    norms = record["config"]["gradient_norms"]
    assert set(norms) == {"1", "15", "30"} and set(norms["1"]) == {"embedding", "layer_0", "layer_1", "output"}
    assert record["seed"] == 5 and record["kind"] == "scaled_down"
    script.run_cell(cell, ["never=read"], tmp_path / "outputs", tmp_path / "records")
    with pytest.raises(RuntimeError, match="2_post_unscaled_6e-3_6 ended with code 2"):
        script.run_cell(
            script.Cell(2, "post", False, "6e-3", 6), ["micro_batch_size=0"], tmp_path / "outputs", tmp_path
        )


def test_a_missing_factorial_is_said_in_one_line(tmp_path) -> None:
    command = [sys.executable, str(SCRIPT), "--stages", "24", "--records", str(tmp_path), "--outputs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.startswith("error: the cells at 12 layers must all be there first")
