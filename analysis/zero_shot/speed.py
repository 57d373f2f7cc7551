"""Compare the speed of the zero-shot evaluations with a plain implementation on the same model.

    python analysis/zero_shot/speed.py --wikitext wiki.valid.tokens --lambada lambada_test.jsonl --tokenizer gpt2-bpe

The plain implementation pads every row to 1,024 tokens and computes logits of the whole vocabulary at every position,
as Megatron-LM v1.0 does. Both score the same windows and passages of real text with the same random weights, in
alternation, and their losses must agree. The time is the minimum over the rounds, because other work shares the
machine. The CPU time of this process, which excludes waiting, is recorded too. Prints the ratios and writes a record.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from lmscale.config import TransformerConfig
from lmscale.config.data import TokenizerConfig
from lmscale.config.zero_shot import LambadaConfig, WikiText103Config
from lmscale.data.tokenizer import load_published_tokenizer
from lmscale.evaluation.cloze import predict_last_words
from lmscale.evaluation.lambada import Passage
from lmscale.evaluation.perplexity import measure_losses
from lmscale.evaluation.windows import Windows
from lmscale.evaluation.zero_shot_task import read_task
from lmscale.models import GPT, build_model
from lmscale.paper import GPT_SIZES
from lmscale.parallel import ParallelContext
from lmscale.results import new_record, record_argument, write_record

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE, WINDOW, STRIDE = 50_257, 1024, 32
SIZES = {"4x256": (4, 256, 4, 16, 32), "12x768": (12, 768, 12, 8, 8)}  # layers, hidden, heads; windows, passages
SIZES["24x1024"] = (*GPT_SIZES["355M"], 4, 8)  # the paper's smallest
ROUNDS = 3
ROWS_AT_ONCE = 4  # of 1,024 tokens, in both methods: the plain one's logits take 0.8 GB


@torch.inference_mode()
def plain_wikitext(model: GPT, tokens: list[int], windows: Windows) -> float:
    """Sum the loss of the scored targets, with padded rows and all logits."""
    total = 0.0
    for start in range(0, len(windows), ROWS_AT_ONCE):
        indices = range(start, min(start + ROWS_AT_ONCE, len(windows)))
        inputs = torch.zeros(len(indices), WINDOW, dtype=torch.int64)
        labels = torch.full((len(indices), WINDOW), -100)
        for row, index in enumerate(indices):
            first, num_read, num_scored = windows[index]
            inputs[row, :num_read] = torch.tensor(tokens[first : first + num_read])
            scored = tokens[first + num_read - num_scored + 1 : first + num_read + 1]
            labels[row, num_read - num_scored : num_read] = torch.tensor(scored)
        total += F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum").item()
    return total


@torch.inference_mode()
def plain_lambada(model: GPT, passages: list[Passage]) -> float:
    """Sum the log-likelihood of the last words, with padded rows, all logits and their maxima."""
    total = 0.0
    for start in range(0, len(passages), ROWS_AT_ONCE):
        chosen = passages[start : start + ROWS_AT_ONCE]
        inputs = torch.zeros(len(chosen), WINDOW, dtype=torch.int64)
        labels = torch.full((len(chosen), WINDOW), -100)
        for row, passage in enumerate(chosen):
            read = (*passage.context, *passage.word[:-1])
            inputs[row, : len(read)] = torch.tensor(read)
            labels[row, len(passage.context) - 1 : len(read)] = torch.tensor(passage.word)
        logits = model(inputs)
        logits.argmax(dim=-1)
        total -= F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
    return total


def compare(plain: Callable[[], float], ours: Callable[[], float]) -> dict[str, tuple[float, float]]:
    """Measure wall and CPU seconds of both, the minimum over alternating rounds.

    Raises:
        RuntimeError: the results differ.
    """
    clocks = {"": time.perf_counter, "cpu_": time.process_time}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in clocks}
    for _ in range(ROUNDS):
        results = []
        for number, method in enumerate((plain, ours)):
            started = {name: clock() for name, clock in clocks.items()}
            results.append(method())
            for name, clock in clocks.items():
                times[name][number].append(clock() - started[name])
        if abs(results[0] - results[1]) > 1e-4 * abs(results[0]):
            raise RuntimeError(f"the results must agree, but are {results[0]} and {results[1]}")
    return {name: (min(taken[0]), min(taken[1])) for name, taken in times.items()}


def flops_bound(layers: int, hidden: int) -> float:
    """Upper bound of the WikiText103 speed-up from computing fewer logits, by matmul FLOPs per window.

    Per token: 24 h^2 + 2 s h (causal attention) per layer, and 2 h V for the logits, at all positions or at `STRIDE`.
    """
    layer_flops = WINDOW * layers * (24 * hidden**2 + 2 * WINDOW * hidden)
    scores = 2 * hidden * 51_200
    return (layer_flops + WINDOW * scores) / (layer_flops + STRIDE * scores)


def measure(name: str, tokens: list[int], passages: list[Passage]) -> dict[str, dict]:
    """Measure times and ratios for one model size."""
    layers, hidden, heads, num_windows, num_passages = SIZES[name]
    config = TransformerConfig("gpt", layers, hidden, heads, VOCAB_SIZE, WINDOW)
    model = build_model(config, ParallelContext(), seed=1234).eval()
    windows = Windows(WINDOW + (num_windows - 1) * STRIDE, WINDOW, STRIDE)
    text, some = tokens[: windows.num_targets + 1], passages[:: len(passages) // num_passages][:num_passages]
    micro_batch_tokens = ROWS_AT_ONCE * WINDOW
    wikitext = compare(
        lambda: plain_wikitext(model, text, windows),
        lambda: measure_losses(model, text, windows, micro_batch_tokens).sum().item(),
    )
    lambada = compare(
        lambda: plain_lambada(model, some),
        lambda: sum(answer.log_likelihood for answer in predict_last_words(model, some, micro_batch_tokens)),
    )
    metrics = {f"{name}/wikitext103/bound": {"value": flops_bound(layers, hidden), "unit": "plain / ours, FLOPs"}}
    for task, unit, times, number in (
        ("wikitext103", "s/window", wikitext, num_windows),
        ("lambada", "s/passage", lambada, num_passages),
    ):
        for clock, (plain, ours) in times.items():
            metrics[f"{name}/{task}/{clock}plain"] = {"value": plain / number, "unit": unit}
            metrics[f"{name}/{task}/{clock}ours"] = {"value": ours / number, "unit": unit}
            metrics[f"{name}/{task}/{clock}ratio"] = {"value": plain / ours, "unit": "plain / ours"}
    return metrics


def main() -> int:
    """Measure, print the ratios and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wikitext", required=True, help="a WikiText file")
    parser.add_argument("--lambada", required=True, help="LAMBADA's passages as JSON lines")
    parser.add_argument("--tokenizer", required=True, help="folder of GPT-2's tokenizer files")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--record", type=record_argument, default=ROOT / "outputs" / "zero_shot_speed.json")
    options = parser.parse_args()
    tokenizer = load_published_tokenizer(TokenizerConfig("gpt2", path=options.tokenizer), "gpt")
    tokens = read_task(WikiText103Config("wikitext103", options.wikitext), tokenizer).tokens
    passages = read_task(LambadaConfig("lambada", options.lambada), tokenizer).passages
    metrics = {}
    for name, size in GPT_SIZES.items():
        metrics[f"{name}/wikitext103/bound"] = {"value": flops_bound(*size[:2]), "unit": "plain / ours, FLOPs"}
    for name in options.sizes:
        metrics |= measure(name, tokens, passages)
        print(json.dumps({key: entry["value"] for key, entry in metrics.items() if key.startswith(name)}), flush=True)
    config = {"sizes": {name: list(SIZES[name]) for name in options.sizes}, "rounds": ROUNDS, "rows": ROWS_AT_ONCE}
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": torch.get_num_threads()}
    record = new_record("zero_shot_speed", "run", config, 1234, metrics, device="cpu", layout=layout)
    write_record(record, options.record)
    print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
