"""`analysis/norm_order/run.py`: its cells, a tiny cell run, killed and repeated, and the losses it is compared with."""

import collections
import json
import math

import numpy as np
import pytest
from composed import composed, composed_run
from omegaconf import OmegaConf

from analysis.norm_order import run as script
from analysis.norm_order.cells import read_cells
from analysis.norm_order.run_folder import read_statistics, reference_losses
from analysis.report.records import read_lines
from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.data.bert_dataset import IGNORE_LABEL, BERTDataset
from lmscale.data.prepare import prepare_corpus
from lmscale.results import new_record, write_record

TINY = ["model.num_layers=2", "trainer.max_steps=30", "trainer.validate_every_steps=15", "micro_batch_size=16"]
TINY += ["global_batch_size=16", "logger.layer_statistics=[1,30]", "trainer.num_validation_samples=64"]


@pytest.mark.parametrize("study", script.FILES)
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
def test_every_kind_of_cell_is_a_run_with_fixed_attention_compilation_threads_and_precision(monkeypatch) -> None:
    monkeypatch.setenv("LMSCALE_DATA", "/texts")
    kinds = {(cell.family, cell.data, cell.order): cell for _, cell in script.read_groups("second")}
    pins = OmegaConf.load(script.CELLS).second.overrides
    for (family, data, order), cell in kinds.items():
        run = composed_run(*(o for o in (*cell.overrides(), *pins) if not o.startswith("hydra.")))
        assert (run.model.family, run.model.norm_order, run.precision.dtype) == (family, order, "fp32")
        assert run.data.path == (None if data == "embedded" else "/texts/race/race_train.jsonl.gz")
        sizes = (run.model.num_layers, run.model.hidden_size, run.model.max_position_embeddings)
        assert sizes == (cell.layers, 64, 32) and run.schedule.warmup_steps == cell.warmup
        pinned = (run.model.attention, run.compile, run.trainer.num_threads, run.model.scale_residual_init)
        assert pinned == ("exact", False, 1, True) and run.trainer.max_steps == 1000


@pytest.mark.slow
def test_the_reference_losses_match_the_scored_tokens() -> None:
    """Against counts of (input token, scored token) pairs in samples of another seed."""
    config = composed("train", "sweep=norm_order")
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
    with pytest.raises(RuntimeError, match=f"{cell.name} ended with code 2"):
        script.run_cell(cell, ["micro_batch_size=0"], tmp_path)


@pytest.mark.slow
def test_a_cell_on_a_file_with_an_absolute_path_has_reference_losses(tmp_path) -> None:
    """The run's record shortens the path, so it must come from the run's configuration."""
    text, number = tmp_path / "text.jsonl", iter(range(10**6))
    documents = [" ".join(f"The word {next(number) % 97} follows it." for _ in range(40)) for _ in range(60)]
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    more = ["data=local", f"data.path={text}", "tokenizer.vocab_size=120", "trainer.num_validation_samples=16"]
    more += ["trainer.max_steps=2", "schedule.warmup_steps=1", "micro_batch_size=4", "global_batch_size=4"]
    record = script.run_cell(script.Cell(2, "post", "6e-3", 5, scaled=False), more, tmp_path)
    assert 0 < record["metrics"]["context_free_loss"]["value"] < record["metrics"]["scored_entropy"]["value"]
    norms = record["config"]["gradient_norms"]
    assert set(norms) == {"1", "2"} and set(norms["1"]) == {"embedding", "layer_0", "layer_1", "output"}


def test_only_cells_with_a_record_are_repeated(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        "sys.argv", ["run.py", "--records", str(tmp_path), "--outputs", str(tmp_path), "--only", "12_mid"]
    )
    assert script.main() == 2
    assert capsys.readouterr().err == "error: `--only` must name cells with a record, but is 12_mid; see --list\n"


def test_statistics_that_are_not_finite_can_be_recorded(tmp_path) -> None:
    sublayers = [{"layer": i, "sublayer": "mlp", "gradient_norm": norm} for i, norm in enumerate((2.0, float("nan")))]
    line = json.dumps({"step": 5, "sublayers": sublayers})
    (tmp_path / "layer_statistics.jsonl").write_text(line + "\n")
    found = read_statistics(tmp_path)
    assert found == {"5": {"gradient_norm/mlp": [2.0, None]}}
    write_record(new_record("cell", "scaled_down", {"statistics": found}, 1, {}), tmp_path / "record.json")
