"""The commands of `analysis/bench_gpu.sh` are ones that their doors take, and its rows say what is reached."""

import importlib.util
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lmscale.bench_config import BenchConfig
from lmscale.config.pretrain import RunConfig

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "analysis" / "bench_gpu.sh"
_spec = importlib.util.spec_from_file_location("bench_gpu_rows", ROOT / "analysis" / "bench_gpu_rows.py")
rows = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rows)


def commands(**changes: str) -> list[list[str]]:
    """What all parts would run."""
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=os.environ | {"DRY_RUN": "1"} | changes, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [shlex.split(line)[1:] for line in done.stdout.splitlines() if ".py" in line and "not measured" not in line]


def values_of(door: str, overrides: list[str]) -> dict:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose(door, overrides)
    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)


def test_every_command_composes_into_a_typed_configuration(tmp_path) -> None:
    (tmp_path / "model.py").write_text("class GPT: ...\nclass GPTConfig: ...\n")
    found = commands(NANOGPT=str(tmp_path / "model.py"))
    benches = [BenchConfig.from_dict(values_of("bench", words)) for script, *words in found if "bench.py" in script]
    assert [bench.model["name"] for bench in benches] == [
        *("gpt_355m", "gpt_355m", "gpt_1.2b", "bert_336m", "bert_336m", "bert_3.9b"),
        *("gpt_355m", "gpt_355m", "gpt_355m", "gpt_2.5b"),
    ]
    assert [bench.cuda_graphs for bench in benches[:6]] == [False, True, False, False, True, False]
    assert [bench.peers for bench in benches[6:]] == [
        ["hf_compiled"],
        ["file_compiled"],
        ["megatron_core"],
        ["ours_bf16"],
    ]
    assert {bench.peak_tflops_per_s for bench in benches} == {790}
    assert len({bench.record for bench in benches}) == len(benches)
    trains = [words for script, *words in found if script == "src/train.py"]
    assert len(found) == len(benches) + len(trains)
    runs = []
    for words in trains:
        kept = [word for word in words if not word.startswith("hydra.run.dir=")]
        runs.append(RunConfig.from_dict(values_of("train", kept) | {"run_dir": "x"}))
    assert [(run.name, run.precision.dtype, run.trainer.max_steps) for run in runs] == [
        ("h200_gpt_8.3b_20_steps", "bf16", 20),
        ("h200_2.5b_fp8_seed_1234", "fp8", 200),
        *((f"h200_2.5b_bf16_seed_{seed}", "bf16", 200) for seed in (1234, 1235, 1236)),
    ]
    assert runs[0].model.recompute == "auto" and "optimizer.moments=bf16" in trains[0]


def test_a_peer_that_is_not_given_is_said_and_the_script_goes_on() -> None:
    done = subprocess.run(["bash", str(SCRIPT), "4"], env=os.environ | {"NANOGPT": ""}, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == "gpt_355m against nanoGPT: not measured, NANOGPT=path/to/model.py is not given\n"
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2 and "one part" in done.stdout
    done = subprocess.run(["bash", str(SCRIPT), "4", "12"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: a part must be a number from 1 to 11, but is 12\n"


def write(path: Path, **metrics: float) -> Path:
    path.write_text(
        json.dumps({"metrics": {n.replace("__", "/"): {"value": v, "unit": "u"} for n, v in metrics.items()}})
    )
    return path


def test_a_row_has_the_required_figure_beside_and_the_verdict(tmp_path) -> None:
    record = write(tmp_path / "a.json", ours__share=0.61)
    assert rows.row("gpt", record, "ours/share", 0.6).endswith("0.61 u (required: 0.6)  reached")
    assert rows.row("gpt", record, "ours/share", 0.62).endswith("(required: 0.62)  NOT REACHED")


def test_the_loss_of_a_run_is_kept_and_compared_with_seeds(tmp_path) -> None:
    write(tmp_path / "record.json")
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/loss\n0,,9\n1,8.0,\n2,7.0,\n3,6.5,\n")
    rows.keep(tmp_path, tmp_path / "kept.json")
    kept = rows.read(tmp_path / "kept.json")
    assert kept["metrics"]["train/loss_fall"]["value"] == 1.5 and kept["train_losses"] == [8.0, 7.0, 6.5]
    name = "train__loss_mean_of_last"
    bf16 = [write(tmp_path / f"{i}.json", **{name: loss}) for i, loss in enumerate((3.0, 3.1, 3.2))]
    assert rows.seeds(write(tmp_path / "near.json", **{name: 3.25}), bf16).endswith("reached")
    assert rows.seeds(write(tmp_path / "far.json", **{name: 3.35}), bf16).endswith("NOT REACHED")


def test_a_loss_that_is_not_finite_is_kept_and_is_not_reached(tmp_path) -> None:
    write(tmp_path / "record.json")
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,8.0\n2,nan\n")
    kept = tmp_path / "kept.json"
    rows.keep(tmp_path, kept)
    assert rows.read(kept)["train_losses"] == [8.0, None]
    assert rows.row("gpt", kept, "train/loss_fall", 0.01).endswith("nan nats/token (required: 0.01)  NOT REACHED")
    with pytest.raises(ValueError, match="train/loss_mean_of_last must be finite, but is nan in"):
        rows.seeds(kept, [kept, kept])


def test_a_record_that_lacks_what_is_asked_for_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys) -> None:
    bare, listed = write(tmp_path / "bare.json", ours__step=1.0), tmp_path / "list.json"
    listed.write_text("[]")
    (tmp_path / "record.json").write_text(bare.read_text())
    (tmp_path / "metrics.csv").write_text("step,train/loss\n")
    mistakes = {
        ("row", "gpt", str(bare), "ours/mfu", "0.5"): "must have the metric ours/mfu, but has not",
        ("row", "gpt", str(listed), "ours/mfu", "0.5"): "must be a record, but has no metrics",
        ("seeds", *[str(bare)] * 3): "has not; a run's record has it from `bench_gpu_rows.py keep`",
        ("seeds", *[str(bare)] * 2): "the records in bf16 must be at least 2",
        ("keep", str(tmp_path), str(tmp_path / "kept.json")): "metrics.csv must have a loss, but has none",
    }
    for words, message in mistakes.items():
        monkeypatch.setattr("sys.argv", ["bench_gpu_rows.py", *words])
        with pytest.raises(SystemExit) as ended:
            rows.main()
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.startswith("error: ") and message in error and error.count("\n") == 1
