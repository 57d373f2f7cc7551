import argparse
import importlib.util
import json
import math
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmscale.config.checks import expand_home
from lmscale.results import collect_environment, new_record, read_record, record_argument, validation_set, write_record

METRICS = {"val/loss": {"value": 3.25, "unit": "nats/token"}, "steps": {"value": 7, "unit": "steps"}}


def make_record(**changes) -> dict:
    fields = {"name": "gpt_tiny", "kind": "run", "config": {"seed": 11, "model": {"hidden_size": 24}}, "seed": 11}
    return new_record(**(fields | {"metrics": METRICS} | changes))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = make_record(layout={"tp_size": 2}, steps=[0, 7], device="some GPU", started=0.0)
    assert record["paths"] == {}
    write_record(record, tmp_path / "deep" / "record.json")
    assert json.loads((tmp_path / "deep" / "record.json").read_text()) == record
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["record.json"]
    assert record["metrics"]["val/loss"] == {"value": 3.25, "unit": "nats/token"}
    assert record["started"] == "1970-01-01T00:00:00+00:00" and record["environment"]["device"] == "some GPU"


def test_what_was_measured_started_with_the_process_unless_a_time_is_given() -> None:
    measured, modelled = make_record(), make_record(kind="modelled", seed=None)
    assert measured["started"] <= measured["finished"] and modelled["started"] is None


def test_a_record_has_the_command_that_wrote_it(monkeypatch) -> None:
    script = Path(__file__).resolve().parents[1] / "analysis" / "demo" / "demo.py"
    monkeypatch.setattr("sys.argv", [str(script), "--text", "/nowhere/two words.txt", "--seed=3"])
    assert make_record()["command"] == "python analysis/demo/demo.py --text '.../two words.txt' --seed=3"
    monkeypatch.setattr("sys.argv", ["/elsewhere/train.py"])
    assert make_record()["command"] == "python train.py"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_metric_is_valid_json_and_is_read_back(tmp_path: Path, value: float) -> None:
    record = make_record(metrics={"train/loss": {"value": value, "unit": "nats/token"}})
    write_record(record, tmp_path / "r.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    stored = json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse)["metrics"]["train/loss"]
    assert stored == {"value": None, "non_finite": str(value), "unit": "nats/token"}


def test_a_non_finite_number_in_the_configuration_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_record(make_record(config={"lr": math.nan}), tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("entry", [3.25, {"value": 3.25}, {"value": "3", "unit": "s"}, {"value": True, "unit": "s"}])
def test_a_metric_without_number_or_unit_is_refused(entry: object) -> None:
    with pytest.raises(ValueError, match="metric `loss` must be a number with a unit, but is"):
        make_record(metrics={"loss": entry})


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(
        ValueError, match="`kind` of a record must be one of run, scaled_down, modelled, but is 'guess'"
    ):
        make_record(kind="guess")


def test_records_contain_no_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repo").mkdir()
    monkeypatch.chdir(tmp_path / "repo")
    monkeypatch.setenv("HOME", "/home/somebody")
    config = {
        "run_dir": str(tmp_path / "repo" / "outputs" / "x"),
        "data": {"path": "/home/somebody/corpus.txt", "cache_dir": None, "other": "/scratch/somebody/data"},
        "overrides": ["data.path=/home/somebody/corpus.txt", "resume=/home/somebody/lr=0.1/x", "schedule=linear"],
        "loss_reduction": "a/b",
        "curve": tmp_path / "repo" / "curve.png",
        "weights": {"/scratch/somebody/a": 1, "/scratch/somebody/b": 2, "/disk/somebody/b": 3, "/x/b (2)": 4},
        "parts": {"/scratch/a": 1, "/disk/a": 2, "own": 3},
        "several": [
            "data.path={/home/somebody/a: 1, /scratch/somebody/b:2}",
            "dev=[/scratch/somebody/a,'/x y/b']",
        ],
        "other": ["url=https://host/a", "prompt=and/or"],
    }
    record = make_record(config=config)
    assert record["config"] == {
        "run_dir": "outputs/x",
        "data": {"path": "~/corpus.txt", "cache_dir": None, "other": ".../data"},
        "overrides": ["data.path=~/corpus.txt", "resume=~/lr=0.1/x", "schedule=linear"],
        "loss_reduction": "a/b",
        "curve": "curve.png",
        "weights": {".../a (1)": 1, ".../b (2)": 2, ".../b (3)": 3, ".../b (2) (4)": 4},
        "parts": {".../a (1)": 1, ".../a (2)": 2, "own": 3},
        "several": ["data.path={~/a: 1, .../b:2}", "dev=[.../a,'.../b']"],
        "other": ["url=https://host/a", "prompt=and/or"],
    }
    assert "somebody" not in json.dumps(record)


def test_a_record_needs_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `docker run --user 1234`, whose user has no name."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError
    assert make_record(config={"path": "/scratch/a"})["config"] == {"path": ".../a"}
    with pytest.raises(ValueError, match=r"but is '~/a'; there is no such user \(~ alone needs HOME\)"):
        expand_home("~/a", "x")


def test_the_environment_names_commit_versions_and_hardware(repository: Path) -> None:
    environment = collect_environment("some GPU")
    if (repository / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
        assert environment["commit"] == head.stdout.strip() and environment["dirty"] in (True, False)
    versions = environment["versions"]
    assert versions["hydra-core"].startswith("1.3")
    assert versions["torch"].startswith("2.") if importlib.util.find_spec("torch") else versions["torch"] is None
    assert environment["num_cores"] >= 1 and environment["memory_bytes"] > 2**30 and environment["cpu"]


def test_the_environment_says_what_decides_how_a_cpu_rounds(monkeypatch) -> None:
    """Two CPUs of one name may round differently: model and stepping, torch's instruction set, its libraries."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    details = collect_environment()["cpu_details"]
    assert details["capability"] == torch.backends.cpu.get_cpu_capability()
    assert details["variables"]["MKL_CBWR"] == "COMPATIBLE"
    if torch.backends.mkl.is_available():
        assert any("Math Kernel Library" in line for line in details["libraries"])
    if Path("/proc/cpuinfo").is_file() and platform.machine() == "x86_64":
        names = ("cpu family", "model", "stepping")
        text = Path("/proc/cpuinfo").read_text()
        numbers = [int(re.search(rf"^{name}\t+: (\d+)$", text, re.M)[1]) for name in names]
        assert [details[key] for key in ("family", "model", "stepping")] == numbers


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    for text, message in (("[1]", r"is \[1\]"), ("{", "fails with Expecting")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match=rf"x\.json must be a record, but {message}"):
            read_record(tmp_path / "x.json")
    write_record(make_record(), tmp_path / "x.json")
    assert read_record(tmp_path / "x.json")["name"] == "gpt_tiny"


PLACES = ["family", "seq_length", "short_seq_probability", "mask_probability", "max_ngram", "tokenizer", "sha256"]
PLACES += ["num_validation_samples"]


@pytest.mark.parametrize("place", PLACES)
def test_losses_are_comparable_only_over_the_same_validation_set(place: str) -> None:
    def name(family="gpt", tokenizer="t", sha256="a", hidden=8, num_validation_samples=4, **data) -> str:
        trainer = {"num_validation_samples": num_validation_samples}
        corpus = {"tokenizer": tokenizer, "validation": {"tokens": 640, "sha256": sha256}}
        model = {"architecture": family, "hidden_size": hidden}
        data = {"seq_length": 32} | data
        return validation_set({"config": {"model": model, "data": data, "corpus": corpus, "trainer": trainer}})

    assert name() == name(hidden=16) and name().startswith("gpt, 640 validation tokens in sequences of 32, set ")
    assert name(**{place: 64 if place == "seq_length" else "another"}) != name()


def test_a_record_that_names_no_validation_set_is_refused() -> None:
    with pytest.raises(KeyError, match="data"):
        validation_set({"config": {"model": {"architecture": "gpt"}, "corpus": {"validation": {"tokens": 640}}}})


def test_writing_records_needs_neither_torch_nor_pandas() -> None:
    code = "import sys, lmscale.results; sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'lightning')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_invalid_record_path_is_refused_before_measuring(tmp_path, capsys) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=record_argument)
    (tmp_path / "file").touch()
    for place, message in (
        (tmp_path, "must be a file, but"),
        (tmp_path / "file/x.json", "in a folder that can be made"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--record", str(place)])
        assert ended.value.code == 2 and message in capsys.readouterr().err
    assert parser.parse_args(["--record", str(tmp_path / "new/x.json")]).record == tmp_path / "new/x.json"
