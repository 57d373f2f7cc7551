"""Compare the speed of `task=blimp` with plain transformers loops over the same weights and sentences.

    python analysis/zero_shot/blimp_speed.py --pairs FOLDER --gpt2 FOLDER --bert FOLDER --record FILE

A GPT's loop scores one sentence at a time, a BERT's one masked row or one sentence's rows at a time; of equal rows it
computes one, too. All methods take turns, the log-likelihoods must agree, and the times are medians over the rounds.
"""

import argparse
import gzip
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from lmscale.config.data import TokenizerConfig
from lmscale.config.zero_shot import BlimpConfig
from lmscale.data.tokenizer import load_published_tokenizer
from lmscale.evaluation.blimp import Blimp
from lmscale.evaluation.loading import load_model
from lmscale.parallel import ParallelContext
from lmscale.results import new_record, record_argument, write_record

NUM_PARADIGMS, NUM_PAIRS, ROUNDS, MICRO_BATCH_TOKENS = 10, 20, 3, 8192


def save_models(folder: Path) -> None:
    """Write a GPT-2 of 4 layers x 256 and a BERT of all-MiniLM's size, with random weights."""
    torch.manual_seed(1234)
    gpt = GPT2Config(n_layer=4, n_embd=256, n_head=4, n_positions=128, bos_token_id=50_256, eos_token_id=50_256)
    GPT2LMHeadModel(gpt).save_pretrained(folder / "gpt")
    bert = BertConfig(num_hidden_layers=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536)
    BertForPreTraining(bert).save_pretrained(folder / "bert")


def some_pairs(source: Path, folder: Path) -> Path:
    """The first pairs of paradigms at equal distances."""
    folder.mkdir()
    files = sorted(source.glob("*.jsonl.gz"))
    for file in files[:: len(files) // NUM_PARADIGMS][:NUM_PARADIGMS]:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            (folder / file.name.removesuffix(".gz")).write_text("".join(itertools.islice(lines, NUM_PAIRS)))
    return folder


@torch.inference_mode()
def loop_gpt(model: GPT2LMHeadModel, task: Blimp) -> float:
    """Sum the log-likelihoods of all sentences."""
    total = 0.0
    for tokens in task.sentences:
        scores = model(torch.tensor([[*task.frame, *tokens]])).logits[0, :-1].log_softmax(dim=-1)
        total += scores[range(len(tokens)), tokens].sum().item()
    return total


@torch.inference_mode()
def loop_bert(model: BertForMaskedLM, task: Blimp, by_sentence: bool) -> float:
    """Sum the log-probabilities of all masked rows."""
    start, end, mask = task.frame
    total = 0.0
    for tokens, items in itertools.groupby(task.items, key=lambda item: item[0]):
        spans = [(first, stop) for _, first, stop in items]
        for part in [spans] if by_sentence else [[span] for span in spans]:
            rows = [[start, *tokens[:i], *[mask] * (j - i), *tokens[j:], end] for i, j in part]
            scores = model(torch.tensor(rows)).logits.log_softmax(dim=-1)
            firsts = [first for first, _ in part]
            total += scores[range(len(part)), [1 + i for i in firsts], [tokens[i] for i in firsts]].sum().item()
    return total


def compare(methods: dict[str, Callable[[], float]], num_pairs: int) -> dict[str, dict]:
    """Median seconds per pair of each method, and their ratios to ours.

    Raises:
        RuntimeError: the sums differ.
    """
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(ROUNDS):
        sums = []
        for name, method in methods.items():
            started = time.perf_counter()
            sums.append(method())
            times[name].append(time.perf_counter() - started)
        if max(sums) - min(sums) > 1e-5 * abs(sums[0]):
            raise RuntimeError(f"the sums must agree, but are {sums}")
    medians = {name: median(taken) for name, taken in times.items()}
    found = {name: {"value": value / num_pairs, "unit": "s/pair"} for name, value in medians.items()}
    for name in medians.keys() - {"ours"}:
        found[f"{name}_ratio"] = {"value": medians[name] / medians["ours"], "unit": "plain / ours"}
    return found


def measure(family: str, folder: Path, pairs: Path, tokenizer: str) -> dict[str, dict]:
    """Compare all methods on one model."""
    task = Blimp.read(
        BlimpConfig("blimp", str(pairs)),
        load_published_tokenizer(TokenizerConfig("gpt2" if family == "gpt" else "bert", path=tokenizer), family),
    )
    ours = load_model(folder / family, ParallelContext()).model
    task = task.for_model(ours.config)
    theirs: type[PreTrainedModel] = GPT2LMHeadModel if family == "gpt" else BertForMaskedLM
    plain = theirs.from_pretrained(folder / family).eval()
    methods = {"ours": lambda: sum(score for (score,) in task.score(ours, MICRO_BATCH_TOKENS))}
    if family == "gpt":
        methods["by_sentence"] = lambda: loop_gpt(plain, task)
    else:
        methods["by_sentence"] = lambda: loop_bert(plain, task, True)
        methods["by_row"] = lambda: loop_bert(plain, task, False)
    return {f"{family}/{name}": entry for name, entry in compare(methods, len(task.pairs)).items()}


def main() -> int:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="folder of BLiMP's files, UID.jsonl.gz")
    parser.add_argument("--gpt2", required=True, help="folder of GPT-2's tokenizer files")
    parser.add_argument("--bert", required=True, help="folder of BERT's vocab.txt")
    parser.add_argument("--record", type=record_argument, required=True)
    options = parser.parse_args()
    metrics = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        pairs = some_pairs(options.pairs, folder / "pairs")
        for family, tokenizer in (("gpt", options.gpt2), ("bert", options.bert)):
            metrics |= measure(family, folder, pairs, tokenizer)
    for name, entry in metrics.items():
        print(f"{name} = {entry['value']:.4g} {entry['unit']}")
    config = {"paradigms": NUM_PARADIGMS, "pairs": NUM_PAIRS, "rounds": ROUNDS, "tokens": MICRO_BATCH_TOKENS}
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": torch.get_num_threads()}
    write_record(new_record("blimp_speed", "run", config, 1234, metrics, device="cpu", layout=layout), options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
