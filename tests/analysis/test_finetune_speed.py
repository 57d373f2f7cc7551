"""The comparison with Hugging Face's Trainer: equal inputs on both sides, and the requested number of rounds."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "finetune"))

from finetuning import make_task, make_tokenizer, write_task  # noqa: E402

from analysis.finetuning import speed as finetune_speed  # noqa: E402
from lmscale.finetune.batches import collate  # noqa: E402
from lmscale.finetune.features import load_features  # noqa: E402
from lmscale.finetune.preparing import prepare_features  # noqa: E402
from lmscale.results import check_no_record, new_record, write_record  # noqa: E402


@pytest.mark.parametrize("name", ["qqp", "squad_v1"])
def test_trainer_gets_the_same_sequences_and_labels_as_ours(tmp_path, name: str) -> None:
    place = write_task(tmp_path, name, 9)
    features = load_features(prepare_features(make_task(name), str(place), make_tokenizer(), tmp_path / "cache"))
    for item, row in enumerate(finetune_speed.as_rows(features, 7)):
        ours = collate(features, np.array([item]))
        assert (
            ours["tokens"][0].tolist() == row["input_ids"] and ours["token_types"][0].tolist() == row["token_type_ids"]
        )
        theirs = [row["start_positions"], row["end_positions"]] if name == "squad_v1" else row["labels"]
        assert ours["labels"][0].tolist() == theirs


def test_a_second_round_can_reuse_the_run_folder(tmp_path, monkeypatch) -> None:
    def train(arguments: list[str]) -> subprocess.CompletedProcess:
        run_dir = Path(next(a for a in arguments if a.startswith("hydra.run.dir=")).partition("=")[2])
        check_no_record(run_dir)  # as the entry script does
        times = {name: {"value": 2.0, "unit": "s"} for name in ("train_time", "train_cpu_time")}
        write_record(new_record("x", "scaled_down", {}, 1, times, device="cpu"), run_dir / "record.json")
        (run_dir / "metrics.csv").write_text("step,train/loss\n5,0.5\n10,0.3\n")
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(finetune_speed, "_run", train)
    monkeypatch.setattr(finetune_speed, "train_theirs", lambda *_: {"wall": 3.0, "cpu": 4.0, "loss": 0.4})
    found = finetune_speed.measure("qqp", tmp_path / "bert", (), tmp_path, rounds=2)
    assert found["qqp/over_trainer/wall/median"]["value"] == 1.5 and found["qqp/over_trainer/cpu/min"]["value"] == 2.0
    assert found["qqp/ours/loss"]["value"] == pytest.approx(0.4) and json.dumps(found)
