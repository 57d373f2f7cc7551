"""`python finetune/run.py`, `ensemble.py` and `median.py` as a user starts them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import warm
from composed import composed
from entry_points import REPOSITORY, environment, only_line, refuse
from finetune_runs import make_checkpoint
from finetuning import sentence, write_task
from hydra import compose, initialize_config_dir

from lmscale.config.finetune import TASKS, FinetuneConfig
from lmscale.finetune import preparing
from lmscale.runtime import world

SMALL = (
    "trainer.num_epochs=1",
    "trainer.num_threads=1",
    "trainer.matmul_precision=highest",  # predictions of an untrained model are nearly tied
    "trainer.accelerator=cpu",
    "task.max_seq_length=32",
    "micro_batch_size=4",
    "global_batch_size=8",
)


def run_script(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return warm.run(
        [str(REPOSITORY / "finetune" / script), *arguments], REPOSITORY, environment(**variables), timeout=300
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> tuple[Path, tuple[str, ...]]:
    """A folder, and overrides that name a checkpoint and QQP files in it."""
    folder = tmp_path_factory.mktemp("finetune")
    ckpt = make_checkpoint(folder / "ckpt")
    train, dev = write_task(folder, "qqp", 16), write_task(folder, "qqp", 9, first=1000)
    data = (f"task.train={train}", f"task.validation.dev={dev}", f"cache_dir={folder / 'cache'}")
    return folder, ("task=qqp", f"ckpt={ckpt}", *data, *SMALL)


def test_a_command_trains_scores_and_saves_at_two_tensor_ranks(places) -> None:
    folder, overrides = places
    done = run_script("run.py", *overrides, "parallel.tp_size=2", f"hydra.run.dir={folder / 'tp'}")
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "tp/record.json").read_text())
    assert record["layout"]["tp_size"] == 2 and record["metrics"]["steps"]["value"] == 2
    assert (folder / "tp/checkpoints/step_2.ckpt/metadata.json").is_file()
    assert (folder / "tp/checkpoints/tokenizer/tokenizer.json").is_file()
    assert (folder / "tp/.hydra/overrides.yaml").is_file()
    # the checkpoint of two ranks is scored by one
    scored = run_script(
        "run.py", *overrides, f"ckpt={folder / 'tp'}", "trainer.num_epochs=0", f"hydra.run.dir={folder / 'one'}"
    )
    assert scored.returncode == 0 and "; trains on nothing, batch" in scored.stdout, scored.stderr
    again = json.loads((folder / "one/record.json").read_text())
    assert again["metrics"]["qqp/accuracy"] == record["metrics"]["qqp/accuracy"]
    # and published with its head
    words = f"source={folder / 'tp'}", f"target={folder / 'published'}", "format=hugging_face"
    published = run_script("../src/convert.py", *words)
    assert published.returncode == 0, published.stderr
    assert "MegatronBertForSequenceClassification.from_pretrained(" in published.stdout.splitlines()[-1]


@pytest.mark.slow
def test_five_seeds_have_a_median_and_make_an_ensemble(places) -> None:
    folder, overrides = places
    sweep = folder / "seeds"
    done = run_script("run.py", *overrides, "sweep=five_seeds", "trainer.save=false", f"hydra.sweep.dir={sweep}")
    assert done.returncode == 0, done.stderr
    runs = [str(sweep / str(number)) for number in range(5)]
    scores = {run: json.loads(Path(run, "record.json").read_text())["metrics"]["qqp/accuracy"]["value"] for run in runs}
    found = run_script("median.py", str(sweep))
    assert found.returncode == 0, found.stderr
    median = sorted(scores.values())[2]
    assert found.stdout.startswith(f"{median:.2f}  one setting") and scores[found.stdout.split()[-1]] == median
    combined = run_script("ensemble.py", *runs, "--out", str(folder / "ensemble"))
    assert combined.returncode == 0, combined.stderr
    assert len((folder / "ensemble/dev/QQP.tsv").read_text().splitlines()) == 10
    record = json.loads((folder / "ensemble/record.json").read_text())
    assert "qqp/accuracy" in record["metrics"] and record["kind"] == "scaled_down"
    # Members of the paper's kind make an ensemble of the paper's kind.
    for run in runs:
        path = Path(run, "record.json")
        about = json.loads(path.read_text())
        about["kind"], about["config"]["paper_size"] = "run", "3.9B"
        path.write_text(json.dumps(about))
    assert run_script("ensemble.py", *runs, "--out", str(folder / "ensemble")).returncode == 0
    record = json.loads((folder / "ensemble/record.json").read_text())
    assert record["kind"] == "run" and record["config"]["paper_size"] == "3.9B ensemble"

    # An ensemble folder may be overwritten, a run folder may not.
    refused = run_script("ensemble.py", *runs, "--out", runs[0])
    assert refused.returncode == 2 and "`--out` must be a folder without a run" in refused.stderr
    (folder / "odd/record.json").mkdir(parents=True)
    refused = run_script("ensemble.py", *runs, "--out", str(folder / "odd"))
    assert refused.returncode == 2 and "odd/record.json must be a record, but fails with" in refused.stderr


def test_a_stopped_sweep_continues_with_the_same_command(places) -> None:
    folder, overrides = places
    sweep = folder / "stopped"
    command = ("run.py", "-m", *overrides, "seed=1,2", f"hydra.sweep.dir={sweep}")
    assert run_script(*command).returncode == 0
    first, second = (sweep / str(number) / "record.json" for number in range(2))
    kept = first.read_bytes()
    second.unlink()
    for checkpoint in (sweep / "1" / "checkpoints").glob("step_*.ckpt"):
        shutil.rmtree(checkpoint)
    done = run_script(*command, SLURM_PROCID="0", SLURM_NTASKS="1")  # as in a batch script
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished before, nothing to do; record: ") == 1 and second.is_file()
    assert first.read_bytes() == kept
    script = REPOSITORY / "finetune" / "run.py"
    refused = refuse(script, *command[1:], "optimizer.lr=1e-3")
    assert refused.returncode == 2 and first.read_bytes() == kept, refused.stderr
    assert "job 0 of the sweep" in refused.stderr
    assert "must be a folder without the record of another run" in refused.stderr
    shutil.rmtree(next((sweep / "0" / "checkpoints").glob("step_*.ckpt")))  # its save had failed
    assert "must be a folder without the record of another run" in refuse(script, *command[1:]).stderr


def test_a_job_that_fails_does_not_end_the_sweep(places) -> None:
    folder, overrides = places
    (folder / "bad.tsv").write_text("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t0\t0\tcat\tdog\t7\n")
    good = overrides[2].partition("=")[2]
    sweep, diverges = folder / "goes_on", "optimizer.lr=1e-3,1e30"
    command = ("run.py", "-m", *overrides, f"task.train={folder / 'bad.tsv'},{good}", diverges, "trainer.save=false")
    done = run_script(*command, "trainer.max_skipped_steps=1", f"hydra.sweep.dir={sweep}")
    assert done.returncode == 2, done.stderr  # that of the first
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line.partition(" (")[0] for line in errors[:2]] == [f"error: job {n} of the sweep" for n in (0, 1)]
    assert "line 2: `is_duplicate` must be one of 0, 1, but is '7'" in errors[0]
    assert "the training has diverged" in errors[2] or "not finite" in errors[2]
    assert errors[-1].startswith("error: 3 jobs failed: job 0 of the sweep (") and errors[-1].count("job ") == 3
    assert [path.parent.name for path in sweep.glob("*/record.json")] == ["2"]
    assert "1 run, best qqp/accuracy first" in done.stdout and "Traceback" not in done.stderr


def test_a_job_that_fails_after_a_signal_ends_the_sweep(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(world, "asked_to_stop", False)

    def fail(*arguments) -> None:
        world.asked_to_stop = True
        raise ValueError("no space left")

    monkeypatch.setattr(preparing, "check_values", lambda values: None)  # before the sweep
    monkeypatch.setattr(preparing, "prepare_job", fail)
    script, folder = REPOSITORY / "finetune" / "run.py", f"hydra.sweep.dir={tmp_path}"
    done = refuse(script, "-m", "task=qqp", "ckpt=x", "seed=1,2", folder)
    assert done.returncode == 2
    assert only_line(done.stderr) == "error: job 0 of the sweep (task=qqp ckpt=x seed=1): no space left"


def test_a_task_of_one_s_own_needs_a_file_and_no_code(places, tmp_path) -> None:
    """The guide's task from files: a table with two texts and JSON lines with one; then like every other task."""
    folder, overrides = places
    text = (REPOSITORY / "docs/guides/finetune.md").read_text(encoding="utf-8")
    (tmp_path / "task").mkdir()
    example = text.split("```yaml outputs/conf/task/cb.yaml\n")[1].split("```")[0]
    (tmp_path / "task/cb.yaml").write_text(example, encoding="utf-8")
    labels = ("entailment", "contradiction")
    rows = [[str(n), sentence(n, 4), sentence(n + 50, 3), labels[n % 3 % 2]] for n in range(20)]
    table = "\n".join("\t".join(row) for row in [["index", "premise", "hypothesis", "label"], *rows])
    (tmp_path / "cb.tsv").write_text(table, encoding="utf-8")
    lines = [json.dumps({"premise": row[1], "label": n % 3 % 2}) for n, row in enumerate(rows)]
    (tmp_path / "cb.jsonl").write_text("\n".join(lines), encoding="utf-8")
    ckpt, cache = overrides[1], overrides[4]
    own = ("--config-dir", str(tmp_path), "task=cb", ckpt, cache, *SMALL, "trainer.save=false")
    forms = {
        "tsv": (("task.columns.id=index", "parallel.tp_size=2"), (1,)),
        "jsonl": (("task.columns.id=null", "task.columns.second=null"), (1, 2)),
    }
    for form, (changes, seeds) in forms.items():
        data = (f"task.train={tmp_path}/cb.{form}", f"task.validation.dev={tmp_path}/cb.{form}")
        for seed in seeds:
            run = tmp_path / form / str(seed)
            done = run_script("run.py", *own, *data, *changes, f"seed={seed}", f"hydra.run.dir={run}")
            assert done.returncode == 0, done.stderr
            record = json.loads((run / "record.json").read_text())
            assert record["kind"] == "scaled_down" and record["metrics"]["steps"]["value"] == 3
            assert "by_size" in record["config"]["task"] and "table_6" not in json.dumps(record)  # not the paper's task
            predicted = [line.split("\t") for line in (run / "predictions/dev/cb.tsv").read_text().splitlines()[1:]]
            assert [name for name, _ in predicted] == [str(n) for n in range(20)]
            right = sum(label == row[3] for (_, label), row in zip(predicted, rows, strict=True))
            assert record["metrics"]["cb/accuracy"]["value"] == pytest.approx(100 * right / 20)
    found = run_script("median.py", str(tmp_path / "jsonl"))
    assert found.returncode == 0 and "of 2:" in found.stdout, found.stderr
    members = [str(tmp_path / "jsonl" / str(seed)) for seed in (1, 2)]
    combined = run_script("ensemble.py", *members, "--out", str(tmp_path / "two"))
    assert combined.returncode == 0, combined.stderr
    assert len((tmp_path / "two/dev/cb.tsv").read_text().splitlines()) == 21
    refused = run_script("ensemble.py", *members, "--out", str(tmp_path / "two/dev/cb.tsv"))
    assert refused.returncode == 2 and refused.stderr.startswith(
        f"error: {tmp_path / 'two/dev/cb.tsv'}/dev cannot be read or written: Not a directory"
    )


def test_a_task_without_a_file_is_answered_by_how_to_give_one(tmp_path) -> None:
    done = refuse(REPOSITORY / "finetune" / "run.py", "task=imdb", "ckpt=x", cwd=tmp_path)
    assert "but is 'imdb'; a table of your own needs task/imdb.yaml in --config-dir" in done.stderr


def test_a_size_that_a_task_has_no_row_for_is_refused(tmp_path) -> None:
    text = (REPOSITORY / "docs/guides/finetune.md").read_text(encoding="utf-8")
    (tmp_path / "task").mkdir()
    example = text.split("```yaml outputs/conf/task/pairs.yaml\n")[1].split("```")[0]
    (tmp_path / "task/pairs.yaml").write_text(example, encoding="utf-8")
    task = ("--config-dir", str(tmp_path), "task=pairs", "size=1.3b", "ckpt=x")
    done = refuse(REPOSITORY / "finetune" / "run.py", *task, cwd=tmp_path)
    expected = (
        "error: `size` must be one of 336m, the rows that the task's file has in `by_size`, but is 1.3b; or give "
    )
    expected += "global_batch_size, optimizer.lr and trainer.num_epochs\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
    done = refuse(REPOSITORY / "finetune" / "run.py", *task[:3], "task.hub_name=x", "ckpt=x", cwd=tmp_path)
    assert "`task.hub_name` is not a known key" in done.stderr and "type +task.hub_name=" in done.stderr
    (tmp_path / "task/pairs.yaml").write_text(example.replace("lr: 5.0e-5, ", ""), encoding="utf-8")
    done = refuse(REPOSITORY / "finetune" / "run.py", *task[:3], "ckpt=x", cwd=tmp_path)
    assert done.stderr == "error: `task.by_size.336m` must have global_batch_size, lr and num_epochs, but lacks lr\n"


@pytest.mark.parametrize(
    "changes, message",
    [
        (("ckpt=/nowhere",), "`ckpt` must be a checkpoint or a run folder, but /nowhere does not exist"),
        (("ckpt=/dev",), "`ckpt` must be a checkpoint or a run folder, but /dev is not a checkpoint"),
        (("task.train=/dev/null",), "error: `task.train`: /dev/null must begin with a line of column names, but is em"),
        (
            ("task.validation.dev=README.md",),
            "error: `task.validation.dev`: line 1 of README.md must have the columns id",
        ),
        (("task.train=/nowhere",), "`task.train` must be a file or folder"),
        (("task.hub=x",), "`task.hub` is not a known key"),
        (("-m", "micro_batch_size=4,0"), "job 1 of the sweep"),
        (("-m", "task.train=finetune/example_qqp.tsv,/nowhere"), "`task.train` must be a file or folder"),
        (
            ("-m", "parallel.tp_size=1,auto"),
            "`parallel.tp_size` must be a whole number for a finetuning, but is 'auto'",
        ),
        (("objective=nothing",), "`objective` must be one of qqp/accuracy"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(places, changes, message: str) -> None:
    folder, overrides = places
    folders = (f"hydra.run.dir={folder / 'x'}", f"hydra.sweep.dir={folder / 'y'}")
    done = refuse(REPOSITORY / "finetune" / "run.py", *overrides, *changes, *folders)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not list(folder.glob("[xy]/**/record.json")), "it was refused after the work"


def test_the_other_scripts_name_what_is_missing(tmp_path) -> None:
    ensembles = [("ensemble.py", [path, "--out", "x"]) for path in (str(tmp_path), __file__)]
    for script, arguments in [("median.py", [str(tmp_path)]), ("median.py", [__file__]), *ensembles]:
        done = run_script(script, *arguments)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("size", ["336m", "1.3b", "3.9b"])
@pytest.mark.parametrize("task", ["mnli", "qqp", *TASKS])
def test_every_task_composes_with_every_row_of_table_6(task: str, size: str) -> None:
    values = composed("finetune", f"task={task}", f"size={size}", "ckpt=x")
    run = FinetuneConfig.from_dict({**values, "run_dir": "/somewhere"})
    table = {
        "mnli": ((128, 1e-5), (128, 1e-5), (128, 1e-5), 10),
        "qqp": ((128, 5e-5), (128, 3e-5), (256, 4e-5), 12),
        "squad_v1": ((64, 3e-5), (48, 3e-5), (48, 1e-5), 2),
        "squad_v2": ((48, 3e-5), (64, 3e-5), (48, 1e-5), 2),
        "race": ((32, 2e-5), (16, 1e-5), (32, 2e-5), 3),
    }[task]
    row = table[["336m", "1.3b", "3.9b"].index(size)]
    assert (run.global_batch_size, run.optimizer.lr, run.trainer.num_epochs) == (*row, table[3])
    assert run.task.name == task and run.to_dict()["task"]["by_size"][size]["lr"] == row[1]


def test_the_other_tasks_of_glue_have_the_settings_of_roberta_large(tmp_path) -> None:
    """Batch, epochs, rate and warm-up of fairseq's examples/roberta/README.glue.md."""
    table = {"cola": (16, 1e-5), "sst2": (32, 1e-5), "mrpc": (16, 1e-5), "stsb": (16, 2e-5), "qnli": (32, 1e-5)}
    for task, (batch, rate) in (table | {"rte": (16, 2e-5), "wnli": (16, 2e-5)}).items():
        run = FinetuneConfig.from_dict(composed("finetune", f"task={task}", "ckpt=x") | {"run_dir": "/somewhere"})
        found = run.global_batch_size, run.optimizer.lr, run.trainer.num_epochs, run.trainer.warmup_fraction
        assert found == (batch, rate, 10, 0.06), task
        done = refuse(REPOSITORY / "finetune" / "run.py", f"task={task}", "size=1.3b", "ckpt=x", cwd=tmp_path)
        assert (
            done.returncode == 2 and "; or give global_batch_size, optimizer.lr and trainer.num_epochs" in done.stderr
        )
    given = "size=1.3b", "global_batch_size=32", "optimizer.lr=2e-5", "trainer.num_epochs=3"
    run = FinetuneConfig.from_dict(composed("finetune", "task=rte", *given, "ckpt=x") | {"run_dir": "/somewhere"})
    assert (run.global_batch_size, run.trainer.warmup_fraction) == (32, 0.065)


@pytest.mark.parametrize("sweep, jobs", [("finetune_search", 25), ("five_seeds", 5), ("glue", 9)])
def test_sweeps_are_grids_of_the_protocol(sweep: str, jobs: int) -> None:
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        swept = compose("finetune", [f"sweep={sweep}", "ckpt=x"], return_hydra_config=True)
    count = 1
    for values in swept.hydra.sweeper.params.values():
        count *= len(str(values).split(","))
    assert count == jobs and swept.hydra.mode.name == "MULTIRUN"
