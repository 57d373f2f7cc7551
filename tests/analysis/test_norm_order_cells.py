"""`analysis/norm_order/run.py`: its cells, their records, a miniature of it, and the committed study."""

import collections
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import warm
from entry_points import environment
from hydra import compose, initialize_config_dir
from made_cells import make_study, records_of, write_cell
from omegaconf import OmegaConf

from analysis.norm_order import run as script
from analysis.norm_order.cells import CELL, at_chosen_rates, read_cells, read_curves, read_gradient_norms, retried_cells
from analysis.norm_order.references import reference_losses
from analysis.norm_order.summary import order_differences, summarize
from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.data.bert_dataset import IGNORE_LABEL, BERTDataset
from lmscale.data.prepare import prepare_corpus

SCRIPT = Path(script.__file__)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def study(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def test_other_records_are_refused_with_their_file_name(study) -> None:
    assert len(script.read_folder(study)) == 36
    path = study / "8_pre_True_3e-3_1.json"
    path.write_text(path.read_text().replace('"hidden_size": 64', '"hidden_size": 128'))
    with pytest.raises(
        ValueError, match="must hold cells of this sweep, but .*8_pre_True_3e-3_1.json belongs to another"
    ):
        script.read_folder(study)
    for torn in ("{", '{"config": {}}', "[]"):
        path.write_text(torn)
        with pytest.raises(ValueError, match="must hold cells of this study, but .*8_pre_True_3e-3_1.json is not one"):
            script.read_folder(study)


def test_the_committed_summary_matches_the_committed_cells() -> None:
    folder = script.RECORDS / "norm_order"
    committed = json.loads(folder.with_suffix(".json").read_text())
    assert summarize(read_cells(script.read_folder(folder)), script.FACTORIAL)["metrics"] == committed["metrics"]


def test_the_claims_of_notebook_04_about_gradients_and_failures_hold() -> None:
    records = script.read_folder(script.RECORDS / "norm_order")
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
    deep = at_chosen_rates(cells, cells, script.FACTORIAL)
    learned = (
        deep[deep["layers"].isin([24, 48])].groupby("order")["state"].agg(["size", lambda s: (s == "learned").sum()])
    )
    assert learned.loc["pre"].tolist() == [8, 8] and learned.loc["post"].tolist() == [8, 1]
    for retry in retried_cells(cells, script.FACTORIAL).itertuples():
        same = (cells["layers"] == retry.layers) & (cells["seed"] == retry.seed) & cells["scaled"]
        assert retry.train_loss < cells[same & (cells["order"] == "pre")]["train_loss"].item()


@pytest.mark.slow
def test_the_reference_losses_match_the_scored_tokens() -> None:
    """Against counts of (input token, scored token) pairs in samples of another seed."""
    with initialize_config_dir(str(script.ROOT / "conf"), version_base=None):
        config = OmegaConf.to_container(compose("train", ["sweep=norm_order"]), resolve=True)
    found = reference_losses(config)
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

    def chance(one: int, other: int) -> float:  # of the scored token given the input `one`
        if one == mask:
            return scored[other]
        same = pairs[one, one] / shown[one]
        return same if one == other else (1 - same) * scored[other] / (1 - scored[one])

    entropy = -sum(share * math.log(share) for share in scored.values())
    least = -sum(count / total * math.log(chance(*pair)) for pair, count in pairs.items())
    assert found["scored_entropy"] == pytest.approx(entropy, abs=0.01)
    assert found["context_free_loss"] == pytest.approx(least, abs=0.01)


def test_the_factorial_runs_first_and_selects_the_rates_of_other_depths(tmp_path) -> None:
    cells = script.cells_of_stage(script.FACTORIAL, script.SEEDS, tmp_path)
    assert len(cells) == 2 * 2 * 3 * 3 and [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    with pytest.raises(ValueError, match="must all have records first, but 12_pre_scaled_1.5e-3_1 has none"):
        script.cells_of_stage(24, script.SEEDS, tmp_path)
    for cell in cells:
        write_cell(tmp_path, cell.layers, cell.order, cell.scaled, cell.lr, cell.seed, 4.0 + (cell.lr != "3e-3"))
        (tmp_path / f"{cell.layers}_{cell.order}_{cell.scaled}_{cell.lr}_{cell.seed}.json").rename(
            tmp_path / f"{cell.name}.json"
        )
    assert {cell.lr for cell in script.cells_of_stage(24, script.SEEDS, tmp_path)} == {"3e-3"}
    assert len(script.cells_of_stage(24, script.SEEDS, tmp_path)) == 12
    assert [cell.seed for cell in script.cells_of_stage(48, script.SEEDS, tmp_path)] == [1] * 4


def test_seeds_that_did_not_learn_are_retried_at_lower_rates(tmp_path) -> None:
    def write(cell, loss: float) -> None:
        write_cell(tmp_path, cell.layers, cell.order, cell.scaled, cell.lr, cell.seed, loss)

    for cell in script.cells_of_stage(script.FACTORIAL, script.SEEDS, tmp_path):
        write(cell, 4.0 + (cell.lr != "3e-3"))
        path = tmp_path / f"{cell.layers}_{cell.order}_{cell.scaled}_{cell.lr}_{cell.seed}.json"
        path.rename(tmp_path / f"{cell.name}.json")
    assert script.cells_to_retry(script.SEEDS, tmp_path) == []
    for cell in script.cells_of_stage(24, script.SEEDS, tmp_path):
        write(cell, 5.95 if (cell.order, cell.scaled) == ("post", True) and cell.seed != 2 else 4.0)
    retries = script.cells_to_retry(script.SEEDS, tmp_path)
    assert [cell.name for cell in retries] == ["24_post_scaled_1.5e-3_1", "24_post_scaled_1.5e-3_3"]
    assert script.cells_to_retry([3], tmp_path) == retries[1:]
    before = order_differences(read_cells(records_of(tmp_path)), 12)
    write(retries[0], 4.2)
    assert script.cells_to_retry(script.SEEDS, tmp_path) == retries  # a cell with a record is not repeated
    found = read_cells(records_of(tmp_path))
    assert order_differences(found, 12).equals(before) and len(retried_cells(found, 12)) == 1
    assert summarize(found, 12)["metrics"]["24_layers/post_scaled/lr_0.0015/seed_1"]["value"] == 4.2


@pytest.mark.slow
def test_a_cell_is_trained_once_and_its_record_has_curve_and_gradients(tmp_path, capfd) -> None:
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
    assert set(norms) == {"1", "2", "15", "30"} and set(norms["1"]) == {"embedding", "layer_0", "layer_1", "output"}
    assert record["seed"] == 5 and record["kind"] == "scaled_down"
    script.run_cell(cell, ["never=read"], tmp_path / "outputs", tmp_path / "records")
    with pytest.raises(RuntimeError, match="2_post_unscaled_6e-3_6 ended with code 2"):
        script.run_cell(
            script.Cell(2, "post", False, "6e-3", 6), ["micro_batch_size=0"], tmp_path / "outputs", tmp_path
        )


@pytest.mark.slow
def test_a_cell_on_a_file_with_an_absolute_path_has_reference_losses(tmp_path) -> None:
    """The run's record shortens the path, so it must come from the run's configuration."""
    text, number = tmp_path / "text.jsonl", iter(range(10**6))
    documents = [" ".join(f"The word {next(number) % 97} follows it." for _ in range(40)) for _ in range(60)]
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    more = ["data=local", f"data.path={text}", "tokenizer.vocab_size=120", "trainer.num_validation_samples=16"]
    more += ["trainer.max_steps=2", "schedule.warmup_steps=1", "micro_batch_size=4", "global_batch_size=4"]
    script.run_cell(script.Cell(2, "post", False, "6e-3", 5), more, tmp_path, tmp_path)
    record = json.loads((tmp_path / "2_post_unscaled_6e-3_5.json").read_text())
    assert 0 < record["metrics"]["context_free_loss"]["value"] < record["metrics"]["scored_entropy"]["value"]


def test_a_missing_factorial_is_one_line(tmp_path) -> None:
    command = [str(SCRIPT), "--stages", "24", "--records", str(tmp_path), "--outputs", str(tmp_path)]
    done = warm.run(command, script.ROOT, environment(), timeout=200)
    assert done.returncode == 2 and done.stderr.startswith("error: the cells at 12 layers must all have records first")
