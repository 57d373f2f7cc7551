"""`python src/generate.py` as a user runs it: any prompt, streams, files, layouts, and one-line errors."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm
from entry_points import REPOSITORY, environment, refuse
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from lmscale.config.data import TokenizerConfig
from lmscale.data.tokenizer import load_published_tokenizer, train_tokenizer

SCRIPT = str(REPOSITORY / "src" / "generate.py")
SIZES = {"n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 4}
NASTY = [
    "a, b, and c",
    "it's \"quoted\" `so`, '\\' and \\",
    "[1, {2: 3}] (x) = y==z",
    "$HOME ${model} \\${x} ${oc.env:HOME",
    "two\nlines\n",
    "",
    "???",
    "null",
    " spaces, before and behind  ",
    "~a +b ++c @d --help -m # !!int 3 %s",
    "choice(1,2),range(1,3)",
    "naïve 漢字 👩‍👩‍👧\t",
    "prompt=x",
]
QUICK = (NASTY[1], NASTY[3], "two\nlines\n", "choice(1,2),range(1,3)")


def generate(*overrides: str, cwd: Path) -> subprocess.CompletedProcess:
    return warm.run([SCRIPT, *overrides], cwd, environment(), timeout=300)


def typed(text: bytes, *overrides: str, cwd: Path) -> subprocess.CompletedProcess:
    return warm.run([SCRIPT, *overrides], cwd, environment(), timeout=300, input=text)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A small GPT-2 saved by transformers, with a tokenizer trained here."""
    folder = tmp_path_factory.mktemp("published") / "gpt2"
    inner = train_tokenizer(["some text to fit a tokenizer: one, two, three; 漢字 and more text"] * 9, "gpt", 320, "x")
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, vocab_size=inner.get_vocab_size(), bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3)
        model.transformer.wpe.weight.mul_(30.0)  # so that greedy text does not repeat
    model.save_pretrained(folder)
    inner.save(str(folder / "tokenizer.json"))
    return folder


def said_only_that_it_compared(done: subprocess.CompletedProcess) -> bool:
    """Whether it succeeded with only the importer's line about the Hugging Face folder, and then the next command."""
    compared, *following = done.stderr.splitlines() or [""]
    said_next = len(following) == 1 and following[0].startswith("type prompts: ") and "interactive=true" in following[0]
    return done.returncode == 0 and compared.startswith("compared with tr") and said_next


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("prompt", [pytest.param(p, marks=[pytest.mark.slow] * (p not in QUICK)) for p in NASTY])
def test_a_prompt_may_be_any_text(published, tmp_path, prompt: str) -> None:
    done = generate(f"ckpt={published}", f"prompt={prompt}", "out=o.jsonl", "max_new_tokens=3", "seed=5", cwd=tmp_path)
    assert said_only_that_it_compared(done), done.stderr
    [row] = rows_of(tmp_path / "o.jsonl")
    assert row["prompt"] == prompt and len(row["tokens"]) <= 3
    assert done.stdout == f"{prompt}{row['text']}\nwrote o.jsonl\n"
    assert [path.name for path in tmp_path.iterdir()] == ["o.jsonl"]


def test_a_path_may_contain_an_equals_sign(published, tmp_path) -> None:
    (tmp_path / "run, x=1").symlink_to(published)
    done = generate("ckpt=run, x=1", "prompt=a", "max_new_tokens=2", "temperature=0", cwd=tmp_path)
    assert said_only_that_it_compared(done) and done.stdout.startswith("a")


def test_a_sweep_is_checked_with_the_literal_prompt(published, tmp_path) -> None:
    done = generate("-m", f"ckpt={published}", "prompt=a, b", "seed=1,2", "max_new_tokens=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("a, b") for line in done.stdout.splitlines()) == 2


def greedy_of_transformers(folder: Path, prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
    """New ids per prompt, and the smallest margin of a chosen token over the second best."""
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    expected, leads = [], []
    for ids in prompts:
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_new,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = output.sequences[0, len(ids) :].tolist()
        expected.append(new[:-1] if new[-1] == model.config.eos_token_id else new)
        best = torch.stack(output.logits)[:, 0].topk(2).values
        leads.append((best[:, 0] - best[:, 1]).min().item())
    return expected, min(leads)


def test_greedy_text_equals_that_of_transformers(published, tmp_path) -> None:
    texts = ["some text", "one, two", "", "a longer one: and more text to fit, two, three"]
    ours = load_published_tokenizer(TokenizerConfig("gpt2", path=str(published)), "gpt")
    ids = [encoded or [ours.id_of("<|endoftext|>")] for encoded in ours.encode_batch(texts)]
    expected, lead = greedy_of_transformers(published, ids, 12)
    assert lead > 1e-9 and len({token for tokens in expected for token in tokens}) > 8
    (tmp_path / "p.txt").write_text("\n".join(texts) + "\n")
    settings = ["file=p.txt", "temperature=0", "max_new_tokens=12", "precision=fp64", "stream=false"]
    done = generate(f"ckpt={published}", *settings, "out=o.jsonl", cwd=tmp_path)
    assert said_only_that_it_compared(done) and done.stdout == "wrote o.jsonl\n"
    assert [row["tokens"] for row in rows_of(tmp_path / "o.jsonl")] == expected


def test_two_ranks_print_once_and_give_the_samples_of_one(published, tmp_path) -> None:
    lines = [{"prompt": "some\ntext"}, {"prompt": "漢"}, {"prompt": "some\ntext"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [f"ckpt={published}", "file=p.jsonl", "num_samples=2", "top_p=0.9", "max_new_tokens=9", "precision=fp64"]
    one = generate(*settings, "out=one.jsonl", "micro_batch_size=1", cwd=tmp_path)
    two = generate(*settings, "out=two.jsonl", "parallel.tp_size=2", cwd=tmp_path)
    assert said_only_that_it_compared(one) and two.returncode == 0, two.stderr
    assert two.stderr.startswith("type prompts: ") and two.stderr.count("\n") == 1
    rows = rows_of(tmp_path / "one.jsonl")
    assert rows == rows_of(tmp_path / "two.jsonl") and two.stdout.replace("two", "one") == one.stdout
    assert [(row["prompt"], row["sample"]) for row in rows] == [
        *[("some\ntext", 0), ("some\ntext", 1), ("漢", 0), ("漢", 1)],
        *[("some\ntext", 2), ("some\ntext", 3)],
    ]
    assert one.stdout.count("--- p.jsonl, line") == 6
    # The sample of a prompt does not depend on its position.
    alone = generate(*settings[:1], "prompt=漢", *settings[2:], "out=alone.jsonl", cwd=tmp_path)
    assert alone.returncode == 0 and rows_of(tmp_path / "alone.jsonl") == rows[2:4]


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prompts_can_be_typed_until_the_input_ends(published, tmp_path, tp_size: int) -> None:
    settings = [f"ckpt={published}", "interactive=true", "max_new_tokens=5", "temperature=0", "out=o.jsonl"]
    text = b"\xef\xbb\xbfone\r\n\xff\nw\0\n" + ("x, " * 99 + "\ntwo, three").encode()
    done = typed(text, *settings, f"parallel.tp_size={tp_size}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "o.jsonl")
    assert [row["prompt"] for row in rows] == ["one", "two, three"]
    assert done.stdout == "".join(row["text"] + "\n" for row in rows) + "wrote o.jsonl\n"
    errors = done.stderr.splitlines()
    errors = [line for line in errors if not line.startswith("compared with transformers")]
    assert errors[0] == "error: a prompt must be UTF-8"
    assert errors[1].startswith("error: a prompt must be plain UTF-8 text, but line 3 has a zero byte, as UTF-16 has")
    assert errors[2].startswith("error: prompt: a prompt must be shorter than the model's positions (64), but is")
    assert len(errors) == 3


@pytest.mark.slow
def test_interactive_mode_shows_an_input_prompt_and_streams_text(published, tmp_path) -> None:
    main, terminal = pty.openpty()
    settings = [f"ckpt={published}", "interactive=true", "max_new_tokens=40", "temperature=0"]
    command = [sys.executable, SCRIPT, *settings]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdin=terminal, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(2) == b"> "
        os.write(main, b"some text\n")
        seen = b""
        while not seen.endswith(b"\n> "):
            seen += os.read(process.stdout.fileno(), 1)
        os.write(main, b"\x04")  # end of input
        assert process.wait(timeout=60) == 0
    os.close(main)
    os.close(terminal)
    expected = generate(f"ckpt={published}", "prompt=some text", *settings[2:], cwd=tmp_path).stdout
    assert "some text" + seen.decode().removesuffix("> ") == expected


@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_file_that_cannot_be_created_is_one_line(published, tmp_path, tp_size: int) -> None:
    out = "/proc/lmscale.jsonl"  # not even by root
    settings = (f"ckpt={published}", "prompt=a", "max_new_tokens=3", f"parallel.tp_size={tp_size}")
    done = generate(*settings, f"out={out}", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("compared with transformers")]
    assert len(errors) == 1 and errors[0].startswith(f"error: `out` must be a file that can be created, but {out}")


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_closed_pipe_ends_it_quietly(published, tmp_path, tp_size: int) -> None:
    command = [sys.executable, SCRIPT, f"ckpt={published}", "prompt=a", "max_new_tokens=60", "num_samples=20"]
    command += [f"parallel.tp_size={tp_size}", "out=o.jsonl"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.read(3) == b"---"
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    said = [line for line in said.splitlines() if not line.startswith("compared with transformers")]
    assert said == []
    assert len(rows_of(tmp_path / "o.jsonl")) > 0  # the batch is completed for it


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_full_disk_behind_the_output_is_one_line_on_every_layout(published, tmp_path, tp_size: int) -> None:
    command = [sys.executable, SCRIPT, f"ckpt={published}", "prompt=a", "max_new_tokens=3"]
    command += [f"parallel.tp_size={tp_size}"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("compared with transformers")]
    assert (done.returncode, len(said)) == (2, 1) and "No space left on device" in said[0], done.stderr


MISTAKES = {
    "no checkpoint": ([], "`ckpt` must be given"),
    "a checkpoint that is not there": (["ckpt=nowhere", "prompt=a"], "`ckpt` must be a checkpoint, a run folder or"),
    "BERT's tokenizer": (["ckpt=x", "prompt=a", "tokenizer=bert"], "`tokenizer.kind` must be gpt2 or null, but is"),
    "a name beside its own tokenizer": (
        ["ckpt=x", "prompt=a", "+tokenizer.name=gpt2"],
        "`tokenizer.name` must be left out without tokenizer=gpt2, but is 'gpt2'",
    ),
    "a name beside a path": (
        ["ckpt=x", "prompt=a", "tokenizer=gpt2", "tokenizer.path=y", "tokenizer.name=z"],
        "`tokenizer.name` must be left out beside `tokenizer.path`, but is 'z'",
    ),
    "prompt and file": (["ckpt=${published}", "prompt=a", "file=b"], "`prompt` must be given, or `file`, or"),
    "no prompt": (
        ["ckpt=${published}"],
        "`prompt` must be given, or `file`, or interactive=true, and one of them, but n",
    ),
    "a negative temperature": (
        ["ckpt=x", "prompt=a", "temperature=-1"],
        "`temperature` must be 0 or at least 0.0001, but is -1",
    ),
    "top_k without draws": (["ckpt=x", "prompt=a", "temperature=0", "top_k=3"], "`top_k` must be left alone with temp"),
    "a long prompt": (
        ["ckpt=${published}", "prompt=" + "x" * 64],
        "prompt: a prompt must be shorter than the model's positions (64), but is 64 tokens",
    ),
    "too many new tokens": (
        ["ckpt=${published}", "prompt=xx", "max_new_tokens=63"],
        "prompt: `max_new_tokens` must be at most 62 (the model's positions, 64, less the prompt's 2 tokens), but is",
    ),
    "a file that exists": (["ckpt=${published}", "prompt=a", "out=${published}"], "`out` must be a file that does not"),
    "text that goes nowhere": (["ckpt=x", "prompt=a", "stream=false"], "`stream` must be true where the text would"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_is_one_line(published, tmp_path, mistake: str) -> None:
    overrides, message = MISTAKES[mistake]
    overrides = [override.replace("${published}", str(published)) for override in overrides]
    done = refuse(SCRIPT, *overrides, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_non_finite_weights_are_refused_in_one_line(published, tmp_path, tp_size: int) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in published.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["transformer.ln_f.bias"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    done = generate(f"ckpt={broken}", "prompt=a", f"parallel.tp_size={tp_size}", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
