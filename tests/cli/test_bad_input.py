"""Invalid configurations: one line, exit code 2, nothing started, nothing written."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import torch
from entry_points import REPOSITORY, TINY, environment, only_line, refuse, slurm_task, train

from lmscale.cli.errors import exit_with

TRAIN = REPOSITORY / "src" / "train.py"
# overrides -> required parts of the message: rule, name, value
BAD = {
    "hidden size and heads": (
        ["model.hidden_size=30"],
        "`model.hidden_size` must be a multiple of `model.num_attention_heads` (4), but is 30",
    ),
    "vocabulary": (
        ["model.vocab_size=1001", "model.vocab_multiple=1", "parallel.tp_size=2"],
        "`model.vocab_multiple` must pad the vocabulary to a multiple of `parallel.tp_size` (2) rows, but 1 pads it to",
    ),
    "a model of Hugging Face": (
        ["model=gpt2"],
        "but is 'gpt2'; import one of Hugging Face: python src/convert.py source=",
    ),
    "unknown data": (["data=webtext"], "`data` must be one of embedded, huggingface, indexed, local, but is 'webtext'"),
    "a sweep of finetuning": (
        ["sweep=finetune_search"],
        "`sweep` must be one of norm_order, scaling, but is",
    ),
    "a key of Lightning's": (["trainer.devices=2"], "; `parallel.tp_size` and `parallel.dp_size` say that here"),
    "a key of Lightning's for one": (
        ["gradient_clip_val=2"],
        "; `optimizer.max_grad_norm` says that here",
    ),
    "appended key": (["+wings=2"], "`wings` is not a known key"),
    "nested key": (["++trainer.wings.left=2"], "`trainer.wings` is not a known key"),
    "a key of other choices": (
        ["data.path=docs"],
        "`data.path` needs data=indexed (binary token files, of prepare_data.py or of Megatron-LM's own tool) or "
        "data=local (your own file or folder), but `data` is another choice",
    ),
    "a sweep without -m": (
        ["optimizer.lr=1e-3,3e-3"],
        "`optimizer.lr` must be one value without -m, which sweeps over",
    ),
    "grammar": (
        ["trainer.max_steps=[1"],
        "with quotes around what is special ('trainer.max_steps=\"[1\"'), but is 'trainer.max_steps=[1'",
    ),
    "a word": (["bert_tiny"], "must be of the form key=value, with quotes around what is special, but is 'bert_tiny'"),
    "a number for a group": (["parallel=4"], "`parallel` must be one of auto, default, but is '4'"),
    "a file as run folder": (
        ["hydra.run.dir=README.md"],
        "`hydra.run.dir` must be a folder that can be made and written, but README.md: File exists",
    ),
    "a file as the folder of a sweep": (
        ["-m", "hydra.sweep.dir=README.md"],
        "`hydra.sweep.dir` must be a folder that can be made and written, but README.md: File exists",
    ),
    "a run folder nowhere": (["hydra.run.dir=/proc/none/run"], "made and written, but /proc/none"),
    "a new folder to resume from": (
        ["resume=auto", "model=gpt_tiny", "hydra.run.dir=outputs/${now:%Y-%m-%d_%H-%M-%S}"],  # as by default
        "`hydra.run.dir` must be the folder of the run to continue with resume=auto, but every start has a new one: /",
    ),
    "a new folder, by the path alone": (
        ["++resume=auto", "model=gpt_tiny", "hydra.run.dir=outputs/${now:%Y-%m-%d_%H-%M-%S}"],
        "to continue with resume=auto, but every start has a new one: /",
    ),
    "a switch for a checkpoint": (
        ["resume=true"],
        "`resume` must be none, auto or the path of a checkpoint, but is true; did you mean `auto`?",
    ),
    "no checkpoint at all": (
        ["++resume=null"],
        "`resume` must be none, auto or the path of a checkpoint, but is null; did you mean `none`?",
    ),
    "a name that is a number": (
        ["name=1E234"],
        """`name` must be text, but is 1e+234; quotes make it text: 'name="..."'""",
    ),
    "a list of paths": (
        ["data=local", "data.path=[A,B]"],
        "`data.path` must be a path or weights by path ({A: 1, B: 2}) or null, but is ['A', 'B']",
    ),
    "weights of text files": (
        ["data=local", "data.path={A: 1, B: 2}"],
        "`data.path` must be one path, of a file or of a folder with all files, unless `data` is indexed, but is {'A'",
    ),
    "nothing masked": (
        ["model=bert_tiny", "data.mask_probability=0"],
        "`data.mask_probability` must be above 0, but is 0",
    ),
    "a logger that is missing": (["logger.wandb=true"], "`logger.wandb` must be false where wandb is not installed"),
    "sequence": (
        ["data.seq_length=129"],
        "`data.seq_length` must be at most `model.max_position_embeddings` (128), but is 129",
    ),
    "no path": (["data=local"], "`data.path` must be given, as data.path=VALUE (`local`: file or folder; `indexed`: "),
    "resume from an empty name": (
        ["resume="],
        "`resume.path` must be none, auto or the path of a checkpoint, but is ''",
    ),
    "validation": (["trainer.num_validation_samples=999999"], "`trainer.num_validation_samples` must be at most"),
    "gpu": (
        ["trainer.accelerator=gpu"],
        "`trainer.accelerator` must be cpu or auto on a machine without a GPU, but is gpu",
    ),
    "not a file": (
        ["data=local", "data.path=/dev/null"],
        "`data.path` must be a file or a folder that can be read, but /dev/null: Not a directory",
    ),
    "missing tokenizer": (
        ["tokenizer=gpt2", "tokenizer.path=no/such"],
        "`tokenizer.path` must be a file or a folder, but no/such does not exist",
    ),
    "vocabulary of the model": (
        ["model.vocab_size=10", "tokenizer.vocab_size=null"],
        "`model.vocab_size` must be above 256 (all bytes and <|endoftext|>), but is 10",
    ),
    "loader processes": (["data.num_workers=100000"], "cores that this process may use, but is 100000"),
    "a batch beyond the memory": (
        ["global_batch_size=100000000000"],
        "GiB free on this host, but is 100,000,000,000",
    ),
    "a stop after the end": (
        ["trainer.stop_after_steps=4"],
        "`trainer.stop_after_steps` must be at most `trainer.max_steps` (3), but is 4",
    ),
    "a timeout without end": (
        ["parallel.timeout_minutes=1e30"],
        "`parallel.timeout_minutes` must be at least 0.0167 (a second) and at most 10080 (a week), but is 1e+30",
    ),
    "a decay after the end": (
        ["schedule=wsd", "schedule.cooldown_steps=1", "schedule.decay_steps=99"],
        "`schedule.decay_steps` must be at most `trainer.max_steps` (3) with `schedule.cooldown_steps`, but is 99",
    ),
    "tokenizer of the other model": (["tokenizer=bert"], "(gpt), but is bert; gpt2 and trained do"),
    "vocabulary below the tokenizer": (
        ["model.vocab_size=300"],
        "`model.vocab_size` must be at least the tokenizer's 400 ids, but is 300",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_is_one_line_and_exit_code_2(case, tmp_path) -> None:
    if case == "gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if case == "a logger that is missing" and importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    overrides, message = BAD[case]
    groups = tuple(o.split("=")[0] + "." for o in overrides if "." not in o.split("=")[0])  # another choice, other keys
    tiny = [o for o in TINY if not o.startswith(groups)]
    done = refuse(TRAIN, *tiny, f"hydra.run.dir={tmp_path}/run", *overrides)
    assert done.returncode == 2, done.stderr
    assert message in only_line(done.stderr)
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []  # no run folder either


@pytest.mark.parametrize("script", ["train", "prepare_data"])
def test_a_temporary_folder_with_a_path_too_long_for_sockets_is_refused(script, tmp_path, monkeypatch) -> None:
    """Loader processes and their rank waited for each other until the time limit."""
    long = tmp_path / ("l" * 110)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "The lighthouse number {i}."}}\n' for i in range(60)))
    source, output = f"sources.local.path={tmp_path}/text.jsonl", f"output={tmp_path}/corpus"
    key, *words = {
        "train": ("data.num_workers", *TINY, f"hydra.run.dir={tmp_path}/run"),
        "prepare_data": ("launcher.workers", source, output, "evaluation=none", "tokenizer.vocab_size=400"),
    }[script]
    done = refuse(REPOSITORY / "src" / f"{script}.py", *words, f"{key}=2")
    assert done.returncode == 2
    assert only_line(done.stderr) == (
        f"error: `TMPDIR` must be a folder for sockets with a short path where `{key}` starts processes, as "
        f"TMPDIR=/tmp is, but is {long} (AF_UNIX path too long)"
    )
    assert list(long.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: mine\nsizes: [1\n", '/model/mine.yaml", line 3, column 1'),
        ("defaults: [base/gptt]", "In 'model/mine': Could not load 'model/base/gptt'."),
    ],
)
def test_a_file_of_one_s_own_is_named_where_it_is_wrong(tmp_path, text, message) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text(text)
    done = refuse(TRAIN, "--config-dir", str(tmp_path), "model=mine")
    assert done.returncode == 2 and message in only_line(done.stderr)


def test_a_cache_of_a_teacher_needs_the_length_of_the_run_s_samples() -> None:
    others = ("ckpt=no/such", "output=none", "trainer.max_steps=1", "global_batch_size=1")
    done = refuse(REPOSITORY / "src" / "cache_logits.py", *others)
    assert (done.returncode, done.stdout) == (2, "")
    assert only_line(done.stderr) == "error: `data.seq_length` must be a whole number, but is null"


def test_an_unusable_corpus_is_refused_before_ranks_start(tmp_path) -> None:
    (tmp_path / "corpus.txt").write_text("One short document.\n\nAnother one.")
    words = ("data=local", f"data.path={tmp_path}/corpus.txt", "parallel.tp_size=2", f"hydra.run.dir={tmp_path}/run")
    done = refuse(TRAIN, *TINY, *words, LMSCALE_CACHE=str(tmp_path / "cache"))
    message = "the validation part must have at least `data.seq_length` + 1 (33) tokens, but has "
    assert done.returncode == 2 and message in only_line(done.stderr)


def test_a_world_size_that_differs_from_the_layout_is_refused(tmp_path) -> None:
    world = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
    }
    overrides = ("parallel.tp_size=2", "parallel.dp_size=2", f"hydra.run.dir={tmp_path}")
    done = refuse(TRAIN, *TINY, *overrides, **world)
    assert done.returncode == 2
    assert (
        "the world size must be `parallel.tp_size` x `parallel.dp_size` (2 x 2), but 3 ranks were started"
        in only_line(done.stderr)
    )


def test_a_restart_by_torchrun_that_would_begin_anew_is_refused(tmp_path) -> None:
    names = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": "2", "RANK": "0", "WORLD_SIZE": "1"}
    names |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    done = refuse(TRAIN, *TINY, f"hydra.run.dir={tmp_path}", **names)
    assert done.returncode == 2
    assert "`resume` must be auto under torchrun's --max-restarts" in only_line(done.stderr)
    done = refuse(TRAIN, *TINY, f"hydra.run.dir={tmp_path}", "resume=auto", "model=gpt_tiny", "max_restarts=1", **names)
    assert "`max_restarts` must be 0 where torchrun has started the ranks, which" in only_line(done.stderr)


CPU = ("src/train.py", "trainer.accelerator=cpu", "micro_batch_size=2")
WITHOUT_TORCH = [  # command, part of the message
    ((*CPU, "parallel.tp_size=3"), "`model.num_attention_heads` must be a multiple of `parallel.tp_size` (3), but is"),
    (
        (*CPU, "model=gpt_8.3b_24heads", "model.hidden_size=1536000"),
        "no tp_size that divides this model fits hosts with",
    ),
    (
        (*CPU, "model=bert_3.9b", "model.num_layers=4800", "parallel.tp_size=auto"),
        "no tp_size fits (`parallel.tp_size`=",
    ),
    (("src/train.py", "data=local", "data.path=no/such"), "no/such"),
    (("src/train.py", "resume=no/such"), "no/such"),
    (("finetune/run.py", "task=qqp", "ckpt=no/such"), "no/such"),
]


def test_an_invalid_size_and_a_missing_path_are_refused_before_torch_is_imported(tmp_path) -> None:
    """In a second of processor time instead of six; one after the other in a process where torch is hidden."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is hidden')")
    code = f"import sys; sys.path[:0] = {[str(REPOSITORY / 'tests'), str(REPOSITORY / 'tests' / 'cli')]!r}\n"
    code += f"from entry_points import refuse\nfor command, _ in {WITHOUT_TORCH!r}:\n"
    code += f"    done = refuse(command[0], *command[1:], 'hydra.run.dir={tmp_path}/run')\n"
    code += "    print([done.returncode, done.stderr])\nassert 'lightning' not in sys.modules"
    path = environment(PYTHONPATH=str(tmp_path))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, env=path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line, (_, message) in zip(done.stdout.splitlines(), WITHOUT_TORCH, strict=True):
        returncode, stderr = ast.literal_eval(line)
        assert returncode == 2 and message in only_line(stderr)


@pytest.mark.parametrize(
    ("script", "changes", "message"),
    [
        ("src/train.py", {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "`WORLD_SIZE` must be set where TORCHELASTIC_RUN"),
        ("src/train.py", slurm_task(0, "29500") | {"SLURM_STEP_ID": ""}, "put srun before python"),
        ("finetune/run.py", slurm_task(0, "29500") | {"SLURM_NTASKS": "x"}, "`SLURM_NTASKS` must be a whole number"),
        ("src/generate.py", {"OMPI_COMM_WORLD_SIZE": "4"}, "`OMPI_COMM_WORLD_SIZE` must be unset, or the number of"),
        ("src/zero_shot.py", {"PL_TRAINER_MAX_STEPS": "1"}, "`PL_TRAINER_MAX_STEPS` must be unset"),
    ],
)
def test_wrong_variables_of_a_launcher_are_refused(tmp_path, script, changes, message) -> None:
    done = refuse(REPOSITORY / script, f"hydra.run.dir={tmp_path}/run", **changes)
    assert done.returncode == 2 and message in only_line(done.stderr)
    assert not (tmp_path / "run").exists()


class Imported(ModuleType):
    """A module whose import tells the variables that Lightning and torchmetrics read as they are imported."""

    def __getattr__(self, name: str) -> NoReturn:
        if name == "__file__":  # which torch's first import asks of every module
            raise AttributeError
        raise ValueError(f"RANK is {os.environ.get('RANK')!r}, LOCAL_RANK {os.environ.get('LOCAL_RANK')!r}")


@pytest.mark.parametrize(
    ("script", "first", "overrides"),
    [
        ("src/train.py", "training.pretrain", TINY),
        ("finetune/run.py", "checkpoint", ("task=qqp", "task.train=finetune", "ckpt=finetune")),
    ],
)
@pytest.mark.parametrize(
    ("changes", "rank"),
    [({"RANK": "x", "LOCAL_RANK": ""}, 0), (slurm_task(1, "29500") | {"LOCAL_RANK": ""}, 1)],
    ids=["left over", "srun"],
)
def test_the_ranks_are_known_before_lightning_is_imported(
    monkeypatch, tmp_path, script, first, overrides, changes, rank
) -> None:
    for name in (first, "finetune.finetuning"):
        monkeypatch.setitem(sys.modules, f"lmscale.{name}", Imported(name))
    done = refuse(REPOSITORY / script, *overrides, f"hydra.run.dir={tmp_path}/run", **changes)
    assert done.returncode == 2 and only_line(done.stderr) == f"error: RANK is '{rank}', LOCAL_RANK '{rank}'"


def test_hydra_full_error_shows_the_traceback(tmp_path) -> None:
    done = train(*TINY, "global_batch_size=5", f"hydra.run.dir={tmp_path}", HYDRA_FULL_ERROR="1")
    assert done.returncode != 0 and "Traceback" in done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    done = train(*TINY, "trainer.max_steps=2", f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["seed=77"], 2),
        (["resume=auto", "seed=77"], 2),
        (["resume=auto", "trainer.max_steps=1", "schedule.decay_steps=2"], 0),
        (["global_batch_size=5"], 2),
    ],
    ids=["another run", "other data", "nothing to do", "sizes"],
)
def test_a_command_that_starts_nothing_does_not_change_the_run_folder(finished, overrides, code) -> None:
    before = contents(finished)
    assert ".hydra/overrides.yaml" in before and ".hydra/hydra.yaml" in before
    done = refuse(TRAIN, *TINY, "trainer.max_steps=2", f"hydra.run.dir={finished}", *overrides)
    assert done.returncode == code, done.stderr
    assert code or ("nothing to do: " in done.stdout and "steps 2 to" not in done.stdout)
    assert contents(finished) == before


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_run_that_its_ranks_refuse_leaves_no_folder(finished, tmp_path, tp_size) -> None:
    damaged = shutil.copytree(finished, tmp_path / "damaged")
    (tensors, *_) = sorted(damaged.rglob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    overrides = (f"resume={damaged}", f"parallel.tp_size={tp_size}", "trainer.max_steps=2")
    done = train(*TINY, *overrides, f"hydra.run.dir={tmp_path}/new")
    assert done.returncode == 2 and "is damaged" in only_line(done.stderr)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_finished_run_without_checkpoints_is_not_restarted(finished, tmp_path, resume) -> None:
    folder = shutil.copytree(finished, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    before = contents(folder)
    done = refuse(TRAIN, *TINY, f"hydra.run.dir={folder}", f"resume={resume}")
    assert done.returncode == 2
    assert f"`hydra.run.dir` must be another folder for a new run, but {folder} has" in only_line(done.stderr)
    assert contents(folder) == before


def test_a_run_stopped_before_its_first_checkpoint_continues_only_with_resume(finished, tmp_path) -> None:
    folder = shutil.copytree(finished, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "record.json"))
    refused = refuse(TRAIN, *TINY, f"hydra.run.dir={folder}")
    assert refused.returncode == 2 and "has the metrics.csv of an earlier one" in only_line(refused.stderr)
    done = train(*TINY, f"hydra.run.dir={folder}", "resume=auto")
    assert done.returncode == 0, done.stderr


def test_an_error_of_the_system_without_a_file_is_told_without_one(capsys) -> None:
    """Such as that of a write to a full disk."""
    with pytest.raises(SystemExit, match="2"):
        exit_with(OSError(28, "No space left on device"))
    assert capsys.readouterr().err == "error: a file cannot be read or written: No space left on device\n"


def test_an_error_of_a_loader_process_is_told_without_its_traceback(capsys) -> None:
    where = 'Original Traceback (most recent call last):\n  File "a.py", line 1, in read\n    raise ValueError('
    with pytest.raises(SystemExit, match="2"):
        exit_with(
            ValueError(f"Caught ValueError in DataLoader worker process 0.\n{where}\nValueError: `a` must be b\n")
        )
    assert capsys.readouterr().err == "error: `a` must be b\n"


@pytest.mark.parametrize(
    "value, rule", [(r"runs/d\${x}y", "not have ${ in it, but is "), ("", "name a folder, but is e")]
)
@pytest.mark.parametrize("options", [(), ("-m", "seed=1")], ids=["run", "sweep"])
def test_an_impossible_name_of_the_run_folder_is_refused_in_one_line(tmp_path, options, value, rule) -> None:
    """Hydra creates the folder of a name with an interpolation as it is, and resolves the name later."""
    key = "hydra.sweep.dir" if options else "hydra.run.dir"
    done = refuse(TRAIN, *options, f"{key}={value}", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"`{key}` must {rule}" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_libraries_without_their_caches_add_no_line(tmp_path) -> None:
    """Lightning imports matplotlib, which looks for fonts where it has no cache of them."""
    command = [sys.executable, REPOSITORY / "src/train.py", *TINY]  # with no import done
    done = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}/run"],
        env=environment(MPLCONFIGDIR=str(tmp_path / "fonts")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and list((tmp_path / "fonts").iterdir())
    assert done.stderr == ""
