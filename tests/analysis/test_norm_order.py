"""The first norm-order study: its cells, tiny runs of them, conclusions from known values, and notebook 04."""

import collections
import json
import math

import numpy as np
import pytest
from composed import composed
from made_studies import make_cell, make_study

from analysis.norm_order import run as script
from analysis.norm_order.cells import CELL, at_chosen_rates, choose_rates, read_cells, read_curves, read_gradient_norms
from analysis.norm_order.run import RECORDS
from analysis.norm_order.run_folder import read_statistics, reference_losses
from analysis.norm_order.summary import (
    FACTORIAL,
    difference,
    endings,
    order_differences,
    start_differences,
    summarize,
)
from analysis.norm_order.tables import order_table, start_table
from analysis.report.records import read_lines
from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.data.bert_dataset import IGNORE_LABEL, BERTDataset
from lmscale.data.prepare import prepare_corpus
from lmscale.results import new_record, write_record


def test_differences_are_paired_by_seed_and_have_students_interval() -> None:
    rows = order_differences(read_cells(make_study()), 4)
    assert list(zip(rows["layers"], rows["scaled"], strict=True)) == [(4, False), (4, True), (8, False), (8, True)]
    assert list(rows["difference"]) == pytest.approx([0.5] * 4)
    assert list(rows["half_width"]) == pytest.approx([4.3026527 * 0.01 / 3**0.5] * 4)  # the seed effect cancels
    assert set(rows["lr_pre"]) == set(rows["lr_post"]) == {3e-3} and set(rows["seeds"]) == {3}
    cells = read_cells([make_cell(4, *arm, "3e-3", 1, 4.0) for arm in (("pre", True), ("post", True))])
    assert difference(cells, "order", "pre", "post") == (0.0, pytest.approx(math.nan, nan_ok=True), 1)


def test_a_rate_at_which_a_run_diverged_is_not_chosen() -> None:
    assert set(choose_rates(read_cells(make_study()), 4).values()) == {3e-3}
    records = make_study(_4_post_1={"loss": 3.0, "lowest_loss": 2.7})
    assert choose_rates(read_cells(records), 4)["post", True] == 1e-3


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
def test_a_cell_is_classified_by_the_stated_rules(metrics, state) -> None:
    assert list(read_cells([make_cell(2, "pre", True, "1e-3", 1, **metrics, context_free_loss=4.7)])["state"]) == [
        state
    ]


def test_two_records_of_one_cell_are_refused() -> None:
    with pytest.raises(ValueError, match="a cell must have one record, but .*'layers': 8.* has two"):
        read_cells([make_cell(8, "pre", True, "3e-3", 1, 4.0)] * 2)


def test_the_summary_has_every_difference_and_count() -> None:
    cells = read_cells(make_study(_8_post_3={"loss": 5.95}))
    record = summarize(cells, 4)
    value = {name: entry["value"] for name, entry in record["metrics"].items()}
    assert value["4_layers/scaled/difference"] == pytest.approx(0.5)
    assert value["4_layers/pre/unscaled_minus_scaled"] == pytest.approx(0.2)
    assert value["4_layers/post/lr_0.001/unscaled_minus_scaled"] == pytest.approx(0.2)
    assert (value["8_layers/scaled/post/stuck"], value["8_layers/scaled/post/learned"]) == (1, 2)
    assert value["8_layers/unscaled/post/learned"] == 3 and value["8_layers/scaled/pre/stuck"] == 0
    assert value["post/stuck"] == 1 and value["post/learned"] == 17 and value["pre/diverged"] == 0
    assert value["cpu_time"] == pytest.approx(2.0 * 36) and value["scored_entropy"] == 6.5
    json.dumps(record, allow_nan=False)
    table = order_table(order_differences(cells, 4))
    assert table["post - pre, 95 %"][1] == "+0.500 +- 0.025" and table["post-norm runs"][3] == "2 learned, 1 stuck"
    starts = start_table(start_differences(cells, 4))
    assert list(starts["learning rate"]) == ["chosen"] * 4 + ["0.001", "0.003"] * 2
    assert (starts["not scaled - scaled, 95 %"] == "").tolist() == [False, False, True, False] + [False] * 4


@pytest.mark.parametrize("metrics", [{"loss": 4.1, "non_finite": 1}, {"loss": 5.95}])
def test_a_run_that_did_not_learn_has_no_final_loss_to_compare(metrics) -> None:
    cells = read_cells(make_study(_8_post_2=metrics))
    record = summarize(cells, 4)
    assert "8_layers/scaled/difference" not in record["metrics"] and "8_layers/scaled/post" not in record["metrics"]
    assert record["metrics"]["8_layers/scaled/pre"]["value"] == pytest.approx(4.3)
    assert "8_layers/post/unscaled_minus_scaled" not in record["metrics"]
    row = order_table(order_differences(cells, 4)).iloc[3]
    assert (row["post-norm (lr)"], row["post - pre, 95 %"]) == ("- (0.003)", "")
    assert row["post-norm runs"] == f"2 learned, 1 {'diverged' if 'non_finite' in metrics else 'stuck'}"


def test_a_run_that_recovers_counts_as_unstable() -> None:
    records = make_study()
    cell = {"layers": 8, "order": "pre", "scaled": True, "lr": "3e-3", "seed": 1}
    (record,) = (record for record in records if record["config"]["cell"] == cell)
    record["config"]["curve"] = [5.0, 4.4, 4.7, 4.2]
    counts = endings(read_cells(records))
    assert counts.loc[8, "pre", True].to_dict() == {"learned": 3, "stuck": 0, "diverged": 0, "unstable": 1}
    assert counts[["learned", "stuck", "diverged"]].to_numpy().sum() == len(records)


def test_the_claims_of_notebook_04_about_gradients_and_failures_hold() -> None:
    records = list(read_lines(RECORDS / "norm_order.jsonl").values())
    cells = read_cells(records)
    norms = read_gradient_norms(records).merge(cells[[*CELL, "state"]], on=CELL)
    stuck = cells[cells["state"] == "stuck"]
    assert set(stuck["order"]) == {"post"} and (stuck["train_loss"] - stuck["scored_entropy"]).abs().max() < 0.02
    curves = read_curves(records).merge(stuck[[*CELL, "scored_entropy"]], on=CELL)
    below = curves[curves["loss"] < curves["scored_entropy"] - 0.05]  # more than the noise of a mean of 25 steps
    fell = below[[*CELL]].drop_duplicates()
    assert fell[["layers", "scaled", "lr"]].to_numpy().tolist() == [[12, True, 6e-3]] * 2

    by_layer = norms.pivot(index=[*CELL, "state", "step"], columns="layer", values="norm")
    top = by_layer.ffill(axis=1).iloc[:, -1]
    later = by_layer.min(axis=1) / top
    later = later[(later.index.get_level_values("step") == 500) & (later.index.get_level_values("state") == "stuck")]
    assert len(later) == len(stuck) and later.max() < 1e-3
    first = by_layer.xs(1, level="step")
    uneven = (first.max(axis=1) / first.min(axis=1)).groupby(["order", "scaled"]).max()
    assert uneven["post", True] < 1.3 and 1.3 < uneven["post", False] < 3
    falls = (first[0] / top.xs(1, level="step")).groupby("order")
    assert falls.min()["pre"] > 1.5 and falls.max()["post"] < 1.3
    deep = at_chosen_rates(cells, cells, FACTORIAL)
    learned = (
        deep[deep["layers"].isin([24, 48])].groupby("order")["state"].agg(["size", lambda s: (s == "learned").sum()])
    )
    assert learned.loc["pre"].tolist() == [8, 8] and learned.loc["post"].tolist() == [8, 1]


TINY = ["model.num_layers=2", "trainer.max_steps=30", "trainer.validate_every_steps=15", "micro_batch_size=16"]
TINY += ["global_batch_size=16", "logger.layer_statistics=[1,30]", "trainer.num_validation_samples=64"]


@pytest.mark.parametrize("study", [name for name, file in script.FILES.items() if (script.RECORDS / file).is_file()])
def test_every_cell_has_one_record_of_its_settings(study: str) -> None:
    recorded = read_lines(script.RECORDS / script.FILES[study])
    cells = {cell.name: cell for _, cell in script.read_groups(study)}
    assert list(recorded) == sorted(cells) and len(cells) == len(list(script.read_groups(study)))
    for name, record in recorded.items():
        cell = record["config"]["cell"]
        assert vars(cells[name]).items() >= (cell | {"lr": str(float(cell["lr"]))}).items()


def test_seeds_that_choose_rates_are_never_scored() -> None:
    seeds = collections.defaultdict(set)
    for group, cell in script.read_groups("second"):
        seeds[group in ("losses", "mechanism", "rescaled", "slow_start", "race", "gpt")].add(cell.seed)
    assert seeds[False] == {101, 102} and not seeds[True] & (seeds[False] | {1, 2, 3})


@pytest.mark.slow
def test_the_reference_losses_match_the_scored_tokens() -> None:
    """Against counts of (input token, scored token) pairs in samples of another seed."""
    config = composed("train", "sweep=norm_order")
    found = reference_losses(config)
    data, tokenizer = DataConfig(**config["data"]), TokenizerConfig(**config["tokenizer"])
    corpus = prepare_corpus(data, tokenizer, "bert", None)
    dataset = BERTDataset(corpus, "train", corpus.parts["train"][0], data, 5)
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

    def chance(one: int, other: int) -> float:  # of the scored token given the input `one`
        if one == mask:
            return scored[other]
        same = pairs[one, one] / shown[one]
        return same if one == other else (1 - same) * scored[other] / (1 - scored[one])

    entropy = -sum(share * math.log(share) for share in scored.values())
    least = -sum(count / total * math.log(chance(*pair)) for pair, count in pairs.items())
    assert found["scored_entropy"] == pytest.approx(entropy, abs=0.01)
    assert found["context_free_loss"] == pytest.approx(least, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("family, least", [("bert", 4.2), ("gpt", 2.5)])
def test_a_cell_killed_half_way_starts_afresh_and_its_repetition_is_equal(tmp_path, capsys, family, least) -> None:
    cell = next(c for _, c in script.read_groups("second") if (c.family, c.lr) == (family, "0.003"))
    (tmp_path / cell.name).mkdir()
    (tmp_path / cell.name / "metrics.csv").write_text("torn")
    script.run_missing([cell], TINY, 1, tmp_path, tmp_path / "records.jsonl")
    recorded = read_lines(tmp_path / "records.jsonl")
    record = recorded[cell.name]
    config = record["config"]
    assert config["cell"] == {**vars(cell)} and config["overrides"] == [*cell.overrides(), *TINY]
    assert set(config["statistics"]) == {"1", "30"} and len(config["statistics"]["1"]["gradient_norm/mlp"]) == 2
    assert least < record["metrics"]["context_free_loss"]["value"] < record["metrics"]["scored_entropy"]["value"]
    assert read_cells([record])["steps"].tolist() == [30]
    assert script.repeat([cell], TINY, recorded, tmp_path) == 0
    assert "equal, bit by bit" in capsys.readouterr().out
    config["losses_sha256"] = "0" * 64
    assert script.repeat([cell], TINY, recorded, tmp_path) == 1
    assert f"{cell.name}: differs in losses_sha256; training loss" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"{cell.name} ended with code 2"):
        script.run_cell(cell, ["micro_batch_size=0"], tmp_path)


def test_statistics_that_are_not_finite_can_be_recorded(tmp_path) -> None:
    sublayers = [{"layer": i, "sublayer": "mlp", "gradient_norm": norm} for i, norm in enumerate((2.0, float("nan")))]
    line = json.dumps({"step": 5, "sublayers": sublayers})
    (tmp_path / "layer_statistics.jsonl").write_text(line + "\n")
    found = read_statistics(tmp_path)
    assert found == {"5": {"gradient_norm/mlp": [2.0, None]}}
    write_record(new_record("cell", "scaled_down", {"statistics": found}, 1, {}), tmp_path / "record.json")
