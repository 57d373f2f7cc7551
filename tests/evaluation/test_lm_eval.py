"""EleutherAI's lm_eval accepts an exported model and finds our answers, row by row, by the command of
docs/guides/lm_eval.md.

lm_eval is in an extra of its own, or in a folder (`pip install --target`) that LMSCALE_LM_EVAL names.
It is looked up behind the environment's own packages. CONTRIBUTING.md has the commands.
"""

import gzip
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crafted import predict_last_words, save_gpt

from lmscale.config import TransformerConfig
from lmscale.config.data import TokenizerConfig
from lmscale.config.zero_shot import TaskConfig
from lmscale.data.tokenizer import Tokenizer, load_published_tokenizer
from lmscale.evaluation.blimp import SENTENCES, Blimp
from lmscale.evaluation.lambada import Passage, encode_passages, read_passages
from lmscale.evaluation.scoring import last_places
from lmscale.hugging_face.conversion import export_hugging_face
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, vocab_parallel_logits
from lmscale.text.whole_file import read_text_file
from lmscale.trained_model import load_model

NUM_LEARNT, ENOUGH_RIGHT = 96, 80
UIDS, NUM_PAIRS = ("adjunct_island", "animate_subject_trans", "only_npi_scope"), 60
SCRIPT = "import sys; sys.path.append(sys.argv.pop(1)); from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


@pytest.fixture(scope="module")
def lm_eval_folder() -> str:
    """Where lm_eval is, or the reason to skip."""
    folder = os.environ.get("LMSCALE_LM_EVAL", "")
    if not (Path(folder) / "lm_eval").is_dir() and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed; set LMSCALE_LM_EVAL to a folder made with pip install --target")
    return folder


def learn(model: torch.nn.Module, passages: list[Passage], enough: int) -> int:
    """Train until so many of the passages' words are right; how many are."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = [passages[i::8] for i in range(8)]
    right = 0
    for _ in range(60):
        for batch in batches:
            tokens, rows, columns, targets = last_places([(passage.read, passage.word) for passage in batch])
            hidden = model.transformer(tokens)[rows, columns]
            weight = model.transformer.word_embedding.weight
            logits = vocab_parallel_logits(hidden, weight, None, model.config.vocab_size, model.context)
            torch.nn.functional.cross_entropy(logits, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        right = sum(answer.right for answer in predict_last_words(model, passages, 8192))
        if right >= enough:
            break
    with torch.no_grad():  # the padded rows have had no gradient and are zero still
        assert not model.transformer.word_embedding.weight[model.config.vocab_size :].any()
    return right


def crafted_checkpoint(folder: Path, tokenizer: Tokenizer, passages: list[Passage]) -> Path:
    """A GPT that knows the last words of some passages by heart."""
    config = TransformerConfig("gpt", 2, 64, 4, 50_257, 256, hidden_dropout=0.0, attention_dropout=0.0)
    model = build_model(config, ParallelContext(), seed=5)
    assert learn(model, passages[:: len(passages) // NUM_LEARNT][:NUM_LEARNT], ENOUGH_RIGHT) >= ENOUGH_RIGHT
    return save_gpt(folder, model, tokenizer, tp_size=2)


def page_fences(repository: Path) -> tuple[dict[str, str], list[str]]:
    """The task files of docs/guides/lm_eval.md by name, and the words of its command."""
    text = (repository / "docs" / "guides" / "lm_eval.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^```yaml outputs/lm_eval_tasks/(\w+)\.yaml\n(.*?)^```$", text, re.S | re.M))
    return files, shlex.split(re.search(r"^lm_eval (.*)$", text, re.M)[1])


@pytest.fixture(scope="module")
def tokenizer(shared_data) -> Tokenizer:
    return load_published_tokenizer(TokenizerConfig("gpt2", path=str(shared_data / "gpt2-bpe")), "gpt")


@pytest.fixture(scope="module")
def lambada(shared_data) -> Path:
    return shared_data / "lambada" / "lambada_test.shared.jsonl"


@pytest.fixture(scope="module")
def models(lambada, tokenizer, tmp_path_factory) -> tuple[Path, Path]:
    """A GPT as our checkpoint, and its export."""
    folder = tmp_path_factory.mktemp("lm_eval")
    passages = encode_passages(read_passages(read_text_file(lambada, "task.path"), "openai"), tokenizer)
    checkpoint = crafted_checkpoint(folder / "ours", tokenizer, passages)
    return checkpoint, export_hugging_face(checkpoint, folder / "published")


def samples(words: list[str], tasks: dict[str, tuple[str, Path]], published: Path, lm_eval: str, folder: Path) -> dict:
    """Run the page's command on our model with these tasks, (file, data) by name; returns its samples by task."""
    (folder / "tasks").mkdir()
    for name, (text, data) in tasks.items():
        text = re.sub(r"outputs/lm_eval_data/\w+\.jsonl", json.dumps(str(data)), text)
        (folder / "tasks" / f"{name}.yaml").write_text(re.sub(r"^task: .*", f"task: {name}", text))
    own = {"--include_path": folder / "tasks", "--output_path": folder / "out", "--tasks": ",".join(tasks)}
    own["--model_args"] = f"pretrained={published},dtype=float32"
    words = [str(own.get(before, word)) for before, word in itertools.pairwise(["", *words])]
    offline = {name: "1" for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")}
    environment = os.environ | offline | {"HF_DATASETS_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", SCRIPT, lm_eval, *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stderr
    found = {}
    for name in tasks:
        (file,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found[name] = sorted(rows, key=lambda row: row["doc_id"])
    return found


@pytest.mark.slow
def test_lm_eval_gives_the_same_likelihoods_and_words(
    repository, lambada, tokenizer, models, lm_eval_folder, tmp_path
) -> None:
    file = read_text_file(lambada, "task.path")
    passages = encode_passages(read_passages(file, "openai"), tokenizer)
    ours = predict_last_words(load_model(models[0], ParallelContext()).model, passages, 8192)
    assert sum(answer.right for answer in ours) >= 50
    files, words = page_fences(repository)
    tasks = {"lambada_local": (files["lambada_local"], lambada)}
    found = samples(words, tasks, models[1], lm_eval_folder, tmp_path)["lambada_local"]
    theirs = [(float(likelihood), greedy == "True") for row in found for likelihood, greedy in row["filtered_resps"]]

    whole = tokenizer.encode_batch([json.loads(line)["text"] for line in file.text.splitlines()])
    alike = [[*p.context, *p.word] == ids for p, ids in zip(passages, whole, strict=True)]
    assert len(theirs) == 2577 and alike.count(False) == 2  # lm_eval cuts the tokens of the whole text
    for row, (likelihood, greedy) in enumerate(theirs):
        if alike[row]:
            assert ours[row].log_likelihood == pytest.approx(likelihood, abs=1e-3), row
            assert ours[row].right == greedy, row
    assert sum(greedy for _, greedy in theirs) >= 50


@pytest.mark.slow
def test_lm_eval_gives_the_same_likelihoods_of_minimal_pairs_but_counts_ties_as_right(
    shared_data, repository, tokenizer, models, lm_eval_folder, tmp_path
) -> None:
    """The last task has no `target_delimiter`: lm_eval then puts a space before each sentence."""
    model, ours = load_model(models[0], ParallelContext()).model, {}
    files, words = page_fences(repository)
    tasks = {}
    for uid in UIDS:
        with gzip.open(shared_data / "blimp" / "pairs" / f"{uid}.jsonl.gz", "rt", encoding="utf-8") as lines:
            tasks[uid] = [json.loads(line) for line in itertools.islice(lines, NUM_PAIRS)]
    first = tasks[UIDS[0]]
    tasks["tie"] = [first[0] | {"UID": "tie", "sentence_bad": first[0]["sentence_good"]}]
    tasks["spaces"] = [row | {"UID": "spaces"} | {name: f" {row[name]}" for name in SENTENCES} for row in first]
    for name, rows in tasks.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = Blimp.read(TaskConfig("blimp", str(file)), tokenizer).for_model(model.config)
        ours[name] = task.answers(task.score(model, 8192))
        tasks[name] = files["blimp_local"], file
    own = files["blimp_local"].replace('target_delimiter: ""\n', "")
    tasks["spaces"] = own, tmp_path / f"{UIDS[0]}.jsonl"
    found, kinds = samples(words, tasks, models[1], lm_eval_folder, tmp_path), set()
    for name in tasks:
        for answer, row in zip(ours[name], found[name], strict=True):
            good, bad = (float(likelihood) for likelihood, _ in row["filtered_resps"])
            assert answer.pair_id == row["doc"]["pairID"]
            assert (answer.good, answer.bad) == (pytest.approx(good, abs=1e-4), pytest.approx(bad, abs=1e-4))
            if name == "tie":
                assert (answer.right, row["acc"]) == (False, 1.0)
            else:
                assert answer.right == (row["acc"] == 1.0)
                kinds.add(answer.right)
    assert kinds == {True, False}
