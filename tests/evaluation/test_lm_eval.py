"""EleutherAI's lm_eval accepts an exported model and finds our answers, row by row.

lm_eval is in an extra of its own, or in a folder (`pip install --target`) that LMSCALE_LM_EVAL names.
It is looked up behind the environment's own packages. CONTRIBUTING.md has the commands.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crafted import predict_last_words, save_gpt

from lmscale.config import TransformerConfig
from lmscale.config.data import TokenizerConfig
from lmscale.data.tokenizer import Tokenizer, load_published_tokenizer
from lmscale.evaluation.lambada import Passage, encode_passages, read_passages
from lmscale.evaluation.loading import load_model
from lmscale.evaluation.scoring import last_places
from lmscale.hugging_face.conversion import export_hugging_face
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, vocab_parallel_logits
from lmscale.text.whole_file import read_text_file

NUM_LEARNT, ENOUGH_RIGHT = 96, 80
TASK = """
task: lambada_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
SCRIPT = """
import json, os, sys
sys.path.append(sys.argv[1])
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
model = HFLM(pretrained=sys.argv[2], device="cpu", dtype="float32", batch_size=16)
tasks = TaskManager(include_path=sys.argv[3], include_defaults=False)
found = lm_eval.simple_evaluate(
    model=model, tasks=["lambada_local"], task_manager=tasks, log_samples=True, bootstrap_iters=0
)
answers = [(s["doc_id"], *s["filtered_resps"][0]) for s in found["samples"]["lambada_local"]]
with open(sys.argv[4], "w") as file:
    json.dump([(row, float(likelihood), str(greedy) == "True") for row, likelihood, greedy in answers], file)
"""


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


@pytest.mark.slow
def test_lm_eval_gives_the_same_likelihoods_and_words(shared_data, tmp_path, lm_eval_folder) -> None:
    path = shared_data / "lambada" / "lambada_test.shared.jsonl"
    tokenizer = load_published_tokenizer(TokenizerConfig("gpt2", path=str(shared_data / "gpt2-bpe")), "gpt")
    file = read_text_file(path, "task.path")
    passages = encode_passages(read_passages(file, "openai"), tokenizer)
    checkpoint = crafted_checkpoint(tmp_path / "ours", tokenizer, passages)
    published = export_hugging_face(checkpoint, tmp_path / "published")
    ours = predict_last_words(load_model(checkpoint, ParallelContext()).model, passages, 8192)
    assert sum(answer.right for answer in ours) >= 50

    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "lambada_local.yaml").write_text(TASK.format(path=json.dumps(str(path))))
    offline = {name: "1" for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")}
    command = [sys.executable, "-c", SCRIPT, lm_eval_folder, published, tmp_path / "tasks", tmp_path / "answers.json"]
    caches = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run = subprocess.run(command, env=os.environ | offline | caches, capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stderr
    theirs = json.loads((tmp_path / "answers.json").read_text())

    whole = tokenizer.encode_batch([json.loads(line)["text"] for line in file.text.splitlines()])
    alike = [[*p.context, *p.word] == ids for p, ids in zip(passages, whole, strict=True)]
    assert len(theirs) == 2577 and alike.count(False) == 2  # lm_eval cuts the tokens of the whole text
    for row, likelihood, greedy in theirs:
        if alike[row]:
            assert ours[row].log_likelihood == pytest.approx(likelihood, abs=1e-3), row
            assert ours[row].right == greedy, row
    assert sum(greedy for _, _, greedy in theirs) >= 50
