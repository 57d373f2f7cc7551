"""The script for Table 3's scaled-down rows: its settings are keys of the entry point, and nothing runs twice."""

import json
from pathlib import Path

import pytest
from composed import composed_run

from analysis.zero_shot import small as zero_shot_small

ROOT = Path(__file__).resolve().parents[2]


def test_the_settings_of_the_training_are_keys_of_the_entry_point() -> None:
    overrides = [
        o for o in zero_shot_small.TRAINING if not o.startswith("resume=")
    ]  # an abbreviation that the entry point expands
    run = composed_run("data=local", "data.path=a.jsonl", "data.validation_path=b.jsonl", *overrides)
    tokens = run.trainer.max_steps * run.global_batch_size * run.data.seq_length
    assert tokens == 2_048_000 and zero_shot_small.TRAINED_ON.startswith("2 million tokens")
    assert set(zero_shot_small.KEPT) <= set(run.to_dict())


@pytest.fixture
def finished(tmp_path: Path, monkeypatch) -> Path:
    """A folder with all results; running an entry point again is an error."""
    metrics = {name: {"value": 5.0, "unit": "any"} for name in ("val/loss", "val/perplexity", "train_time", "other")}
    config = {name: {"of": name} for name in zero_shot_small.KEPT} | {"logger": {}}
    for name, record in {
        "gpt_race": {"metrics": metrics, "config": config},
        "lambada": {"metrics": {"right": {"value": 3, "unit": "count"}}, "config": {"model": {}}},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps(record))
    monkeypatch.setattr(zero_shot_small, "run_script", lambda *words: pytest.fail(f"{words} is done already"))
    return tmp_path


def test_a_finished_evaluation_gets_the_training_data_of_its_model(finished: Path) -> None:
    run = zero_shot_small.train(Path("nowhere"), finished)
    record = zero_shot_small.evaluate("lambada", Path("nowhere"), run, finished)
    assert set(record["metrics"]) == {"right", "training/val/loss", "training/val/perplexity", "training/train_time"}
    assert set(record["config"]["training"]) == {*zero_shot_small.KEPT, "trained_on"}
