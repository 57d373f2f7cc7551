"""`python src/zero_shot.py` as a user runs it: counts, records, layouts, and one-line errors."""

import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm
from entry_points import REPOSITORY, TINY, environment, refuse, slurm_task, train
from ranks import free_ports, torchrun_rank
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

from lmscale.data.tokenizer import train_tokenizer

SCRIPT = str(REPOSITORY / "src" / "zero_shot.py")
WIKI = " \n = Lobsters = \n \n The lobster is a large , blue crustacean of the sea . \n" * 6
TEXTS = [
    "The lobster is a large, blue crustacean of the sea.",
    "He said that the lobsters of the sea are large and blue",
]


def zero_shot(*overrides: str, cwd: Path) -> subprocess.CompletedProcess:
    return warm.run([SCRIPT, *overrides], cwd, environment(), timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working directory with a small published GPT-2, its tokenizer, and a file for each task."""
    root = tmp_path_factory.mktemp("zero_shot")
    inner = train_tokenizer(TEXTS * 5, "gpt", 301, "x")
    torch.manual_seed(3)
    sizes = {"n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=inner.get_vocab_size(), bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.2)
    model.save_pretrained(root / "gpt2")
    inner.save(str(root / "gpt2" / "tokenizer.json"))
    (root / "wiki.tokens").write_text(WIKI, encoding="utf-8")
    rows = [{"text": " ".join(TEXTS[i % 2].split()[: 3 + i % 7])} for i in range(13)]
    (root / "lambada.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (root / "original.txt").write_text("the lobster is blue\nhe said that , '' he said\n", encoding="utf-8")
    return root


WIKITEXT = ("task=wikitext103", "task.path=wiki.tokens", "task.window=16", "task.stride=5", "precision=fp64")
LAMBADA = ("task=lambada", "task.path=lambada.jsonl", "precision=fp64")


def metrics_of(run_dir: Path) -> dict[str, float]:
    record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    return {name: entry["value"] for name, entry in record["metrics"].items()}


def test_counts_need_no_checkpoint(folder: Path) -> None:
    for tokenizer in (("tokenizer=gpt2", "tokenizer.path=gpt2"), ("ckpt=gpt2",)):
        run = zero_shot(*WIKITEXT, *tokenizer, "count_only=true", cwd=folder)
        assert run.returncode == 0 and run.stderr == ""
        counts = dict(line.split(" = ") for line in run.stdout.splitlines())
        assert list(counts) == ["T_o", "T", "windows", "windows_megatron", "window", "stride"]
        assert (int(counts["T_o"]), counts["window"], counts["stride"]) == (len(WIKI.strip().split(" ")), "16", "5")


def test_the_record_has_the_perplexity_and_everything_it_depends_on(folder: Path) -> None:
    run = zero_shot(*WIKITEXT, "ckpt=gpt2", "hydra.run.dir=wiki", cwd=folder)
    assert run.returncode == 0, run.stderr
    found = metrics_of(folder / "wiki")
    num_words, num_targets = len(WIKI.strip().split(" ")), found["wikitext103/T"]
    assert (found["wikitext103/T_o"], found["wikitext103/window"], found["wikitext103/stride"]) == (num_words, 16, 5)
    assert found["wikitext103/windows"] == 1 + math.ceil((num_targets - 16) / 5)
    loss_sum = found["wikitext103/loss"] * num_targets
    assert found["wikitext103/perplexity"] == pytest.approx(math.exp(loss_sum / num_words))
    assert found["wikitext103/perplexity_megatron"] == pytest.approx(math.exp(loss_sum / (num_words - 1)))
    record = json.loads((folder / "wiki" / "record.json").read_text(encoding="utf-8"))
    about = record["config"]
    assert record["kind"] == "scaled_down" and record["name"] == "zero_shot_wikitext103"
    assert about["file"]["name"] == "wiki.tokens" and len(about["file"]["sha256"]) == 64
    assert about["file"]["split"] == "other" and about["detokenizer"] == "megatron_v1"
    assert len(about["tokenizer"]["sha256"]) == 64 and len(about["checkpoint"]["id"]) == 16
    assert about["model"]["num_layers"] == 2 and about["zero_shot"]["task"]["stride"] == 5
    for text in (f"T_o = {num_words}", about["checkpoint"]["id"], about["tokenizer"]["sha256"][:16], "stride = 5"):
        assert text in run.stdout


def test_the_next_commands_have_the_tokenizer_that_was_given(bad_inputs: Path) -> None:
    given = ("ckpt=no_tokenizer", "tokenizer=gpt2", "tokenizer.path=gpt2")
    run = zero_shot(*LAMBADA, *given, cwd=bad_inputs)
    assert run.returncode == 0, run.stderr
    script, *words = shlex.split(run.stdout.rpartition("use: ")[2])[1:]
    assert words == [*given, "prompt=The"]
    done = warm.run([script, *words, "max_new_tokens=1"], bad_inputs, environment(), timeout=300)
    assert done.returncode == 0 and " ".join(given) in done.stderr.rpartition("type prompts: ")[2], done.stderr


def test_the_answers_are_written_one_per_line(folder: Path) -> None:
    run = zero_shot(*LAMBADA, "task.stop_word_filter=true", "ckpt=gpt2", "hydra.run.dir=cloze", cwd=folder)
    assert run.returncode == 0, run.stderr
    found = metrics_of(folder / "cloze")
    answers = [json.loads(line) for line in (folder / "cloze" / "answers.jsonl").read_text().splitlines()]
    assert [answer["line"] for answer in answers] == list(range(1, 14))
    for name, key in (("last_word", "right"), ("last_token", "last_token_right")):
        share = 100 * sum(answer[key] for answer in answers) / 13
        assert found[f"lambada_openai/accuracy_{name}"] == share
    assert "lambada_openai/accuracy_last_word_no_stop_words" in found
    original = (*LAMBADA[:1], "task.path=original.txt", "task.form=original", "ckpt=gpt2", "hydra.run.dir=original")
    assert zero_shot(*original, cwd=folder).returncode == 0
    assert metrics_of(folder / "original")["lambada_original/passages"] == 2


@pytest.mark.parametrize(
    "task, layout",
    [
        (WIKITEXT, "parallel.tp_size=2"),
        pytest.param(LAMBADA + ("micro_batch_tokens=20",), "parallel.dp_size=3", marks=pytest.mark.slow),
    ],
)
def test_ranks_started_by_the_script_give_the_same_numbers(folder: Path, task: tuple[str, ...], layout: str) -> None:
    alone, shared = f"plain_{layout}", f"ranks_{layout}"
    plain = zero_shot(*task, "ckpt=gpt2", f"hydra.run.dir='{alone}'", cwd=folder)
    assert plain.returncode == 0, plain.stderr
    run = zero_shot(*task, "ckpt=gpt2", layout, f"hydra.run.dir='{shared}'", cwd=folder)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("checkpoint gpt2") == 1  # only one rank prints
    expected, found = metrics_of(folder / alone), metrics_of(folder / shared)
    for name in expected.keys() - {"evaluation_time"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name


@pytest.mark.slow
def test_a_model_trained_with_padded_heads_is_evaluated_at_any_layout(folder: Path) -> None:
    """One head over two ranks, from `src/train.py` to the record."""
    padded = ("parallel.tp_size=2", "parallel.pad_heads=true")
    trained = train(*TINY, *padded, "model.num_attention_heads=1", f"hydra.run.dir={folder / 'one_head'}")
    assert trained.returncode == 0, trained.stderr
    found = []
    for name, layout in (("one_head_plain", ()), ("one_head_padded", padded)):
        run = zero_shot(*WIKITEXT, "ckpt=one_head", f"hydra.run.dir={name}", *layout, cwd=folder)
        assert run.returncode == 0, run.stderr
        found.append(metrics_of(folder / name))
    for name in found[0].keys() - {"evaluation_time"}:
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-12), name


def test_the_record_of_another_run_is_kept(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "record.json").write_text("a training's")
    run = zero_shot(*LAMBADA, "ckpt=gpt2", "hydra.run.dir=mine", cwd=folder)
    assert run.returncode == 2 and "`hydra.run.dir` must be a folder without the record of another run" in run.stderr
    assert (folder / "mine" / "record.json").read_text() == "a training's"


@pytest.mark.parametrize(
    "words", [(SCRIPT, *LAMBADA), (str(REPOSITORY / "src" / "generate.py"), "prompt=x", "max_new_tokens=4")]
)
def test_another_number_of_ranks_than_that_of_the_layout_is_refused(folder: Path, words: tuple[str, ...]) -> None:
    run = warm.run([*words, "ckpt=gpt2"], folder, environment(**torchrun_rank(0, 3)), timeout=300)
    refusal = "`parallel` must be a grid of the 3 ranks that were started, but is one of 1"
    assert run.returncode == 2 and run.stderr.splitlines() == [f"error: {refusal}"]


@pytest.mark.slow
def test_the_script_joins_the_ranks_of_torchrun(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, *LAMBADA]
    command += ["ckpt=gpt2", "parallel.dp_size=2", "hydra.run.dir=torchrun"]
    run = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert metrics_of(folder / "torchrun")["lambada_openai/passages"] == 13
    run = zero_shot(*LAMBADA, "ckpt=gpt2", "hydra.run.dir=alone", cwd=folder)
    same = ("torchrun", "alone")
    assert len({(folder / name / "answers.jsonl").read_bytes() for name in same}) == 1


@pytest.mark.slow
def test_the_scripts_join_the_ranks_of_srun(folder: Path) -> None:
    text = (str(REPOSITORY / "src" / "generate.py"), "prompt=lobster", "max_new_tokens=4", "temperature=0")
    commands = {
        "zero_shot": (SCRIPT, *LAMBADA, "parallel.dp_size=2", "hydra.run.dir=srun"),
        "generate": (*text, "parallel.tp_size=2", "out=srun.jsonl"),
    }
    for name, command in commands.items():
        port = str(free_ports()[0])
        tasks = [
            subprocess.Popen(
                [sys.executable, *command, "ckpt=gpt2"],
                cwd=folder,
                env=environment(**slurm_task(rank, port)),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for process in tasks:
            _, stderr = process.communicate(timeout=200)
            assert process.returncode == 0, f"{name}: {stderr}"
    assert metrics_of(folder / "srun")["lambada_openai/passages"] == 13
    assert len((folder / "srun.jsonl").read_text().splitlines()) == 1


def test_a_path_with_an_equals_sign_works_in_quotes_and_the_error_without_says_so(folder: Path) -> None:
    shutil.copytree(folder / "gpt2", folder / "step=3, new", dirs_exist_ok=True)
    run = zero_shot(*LAMBADA, 'ckpt="step=3, new"', "hydra.run.dir=quoted", cwd=folder)
    assert run.returncode == 0, run.stderr
    run = zero_shot(*LAMBADA, "ckpt=step=3", "hydra.run.dir=unquoted", cwd=folder)
    assert run.returncode == 2 and "is special ('ckpt=\"step=3\"'), but is 'ckpt=step=3'" in run.stderr


def test_a_sweep_over_checkpoints_writes_one_record_per_job(folder: Path) -> None:
    shutil.copytree(folder / "gpt2", folder / "other", dirs_exist_ok=True)
    run = zero_shot(*LAMBADA, "-m", "ckpt=gpt2,other", "hydra.sweep.dir=swept", cwd=folder)
    assert run.returncode == 0, run.stderr
    assert len(list((folder / "swept").rglob("record.json"))) == 2


@pytest.fixture(scope="module")
def bad_inputs(folder: Path) -> Path:
    """Invalid files and models beside valid ones."""
    (folder / "half.jsonl").write_text('{"text": "the lobster \\ud800 of the sea"}\n')
    for encoding in ("utf-16", "utf-16-le"):  # with and without a byte-order mark
        (folder / f"{encoding}.tokens").write_bytes(WIKI.encode(encoding))
    torch.manual_seed(3)
    BertForPreTraining(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30)
    ).save_pretrained(folder / "bert")
    shutil.copytree(folder / "gpt2", folder / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(folder / "gpt2", folder / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(folder / "gpt2", folder / "wrong_tokenizer")
    larger = train_tokenizer([f"other words of another text, number {n * n}" for n in range(999)], "gpt", 500, "x")
    larger.save(str(folder / "wrong_tokenizer" / "tokenizer.json"))
    (folder / "no_model").mkdir()
    return folder


@pytest.mark.parametrize(
    "overrides, message",
    [
        ((*LAMBADA,), "`ckpt` must be given, unless count_only=true"),
        (
            (*LAMBADA, "ckpt=none"),
            "`ckpt` must be a checkpoint, a run folder or a Hugging Face folder, but checkpoint none",
        ),
        ((*LAMBADA, "ckpt=no_model"), "Hugging Face folder, but no_model is not a checkpoint: it has no"),
        ((*LAMBADA, "ckpt=lambada.jsonl"), "a Hugging Face folder, but lambada.jsonl is a file, not a directory"),
        ((*LAMBADA, "ckpt=no_weights"), "has a config.json but neither model.safetensors nor pytorch_model.bin"),
        ((*LAMBADA, "ckpt=bert"), "`ckpt` must be a GPT, which predicts the next token, but bert is a BERT"),
        ((*LAMBADA, "ckpt=no_tokenizer"), "`tokenizer` must be given (tokenizer=gpt2 tokenizer.path=FOLDER)"),
        ((*LAMBADA, "ckpt=wrong_tokenizer"), "the tokenizer must be that of the checkpoint, whose model has"),
        ((*LAMBADA, "ckpt=gpt2", "tokenizer=gpt2", "tokenizer.path=wrong_tokenizer"), "must be that of the checkpoint"),
        ((*LAMBADA, "ckpt=gpt2", "tokenizer=bert"), "`tokenizer.kind` must be gpt2 or null, but is 'bert'"),
        ((*LAMBADA, "ckpt=gpt2", "tokenizer.path=none"), "`tokenizer.path` must be a file or a folder"),
        ((*LAMBADA, "count_only=true"), "`tokenizer` must be given"),
        ((*LAMBADA, "ckpt=gpt2", "parallel.tp_size=3"), "`num_attention_heads` must be a multiple of `tp_size` (3)"),
        ((*LAMBADA, "ckpt=gpt2", "parallel.pp_size=2"), "`parallel.pp_size` is not a known key or group of"),
        (
            (*LAMBADA, "ckpt=gpt2", "task.stride=3"),
            "`task.stride` needs task=wikitext103, but `task` is another choice",
        ),
        (
            (*WIKITEXT[:3], "ckpt=gpt2"),
            "`task.stride` must be at most `task.window` (16), but is 32; set both: task.window=16 task.stride=8",
        ),
        ((*WIKITEXT, "ckpt=gpt2", "task.window=65"), "`task.window` must be at most the model's positions (64)"),
        ((*WIKITEXT, "ckpt=gpt2", "task.path=."), "`task.path` must be a file that can be read"),
        ((*WIKITEXT, "ckpt=gpt2", "task.path=utf-16.tokens"), "utf-16.tokens must be UTF-8, but begins with UTF-16"),
        (
            (*WIKITEXT, "ckpt=gpt2", "task.path=utf-16-le.tokens"),
            "utf-16-le.tokens must be plain UTF-8 text, but line 1 has a zero byte",
        ),
        ((*WIKITEXT, "ckpt=gpt2", "task.path=lambada.jsonl"), "must be a WikiText file, but lambada.jsonl has JSON"),
        ((*LAMBADA, "ckpt=gpt2", "task.path=half.jsonl"), "but half.jsonl, line 1 has half a surrogate pair"),
        (("task=imagenet", "ckpt=gpt2"), "`task` must be one of blimp, lambada, wikitext103, but is 'imagenet'\n"),
        (("ckpt=gpt2",), "`task` must be one of blimp, lambada, wikitext103, but is not given"),
        (("task=lambada", "ckpt=gpt2"), "`task.path` must be given"),
        (("task=lambada", "task.path=x", "ckpt=gpt2", "task.name=[a]"), "`task` must be one of "),
    ],
)
def test_an_error_is_one_line(bad_inputs: Path, overrides: tuple[str, ...], message: str) -> None:
    run = refuse(SCRIPT, *overrides, "hydra.run.dir=bad", cwd=bad_inputs)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1 and message in run.stderr
    assert run.stdout == "" and not (bad_inputs / "bad" / "record.json").exists()


def test_several_ranks_report_damage_in_one_line(bad_inputs: Path) -> None:
    broken = shutil.copytree(bad_inputs / "gpt2", bad_inputs / "broken", dirs_exist_ok=True)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-50])
    for layout in ((), ("parallel.dp_size=2",)):
        run = zero_shot(*LAMBADA, "ckpt=broken", "hydra.run.dir=bad", *layout, cwd=bad_inputs)
        assert run.returncode == 2
        assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1 and "model.safetensors" in run.stderr
