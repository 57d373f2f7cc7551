"""Perplexity against brute force, known models, other layouts and plain transformers code."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from crafted import oracle, save_gpt, zero_model
from ranks import make_context, run_ranks
from sharding import COMPLETEP, random_model, small_config
from transformers import AutoModelForCausalLM

from lmscale.evaluation.task import perplexity
from lmscale.evaluation.wikitext103 import WikiText103
from lmscale.hugging_face.conversion import export_hugging_face
from lmscale.parallel import ParallelContext
from lmscale.trained_model import load_model

SHAPES = [(13, 5), (13, 1), (13, 13), (7, 3), (1, 1), (12, 4)]
WORLD = 4


def stream(num_tokens: int, vocab_size: int = 99) -> list[int]:
    return random.Random(5).choices(range(vocab_size), k=num_tokens)


def context_of(target: int, window: int, stride: int) -> int:
    """The first token that is read for a target, said in another way than `WikiText103` does: the window grows at the
    start of the text and then jumps by `stride` as soon as the target no longer fits."""
    first = 0
    while target >= first + window:
        first += stride
    return first


@torch.inference_mode()
def brute_force(model, tokens: list[int], window: int, stride: int) -> list[float]:
    """The loss of each target from a separate forward pass over its whole context."""
    losses = []
    for target in range(len(tokens) - 1):
        inputs = torch.tensor([tokens[context_of(target, window, stride) : target + 1]])
        losses.append(-model(inputs)[0, -1].log_softmax(dim=-1)[tokens[target + 1]].item())
    return losses


def wikitext(tokens: Sequence[int], window: int, stride: int) -> WikiText103:
    return WikiText103("wiki", "0", "other", 4, tokens, window, stride)


def losses_of(model, tokens: list[int], window: int, stride: int, micro_batch_tokens: int = 40) -> list[float]:
    return [loss for (loss,) in wikitext(tokens, window, stride).score(model, micro_batch_tokens)]


@pytest.mark.parametrize("window, stride, changes", [*((*shape, {}) for shape in SHAPES), (13, 5, COMPLETEP)], ids=str)
def test_the_loss_of_a_text_is_the_sum_over_single_tokens(window: int, stride: int, changes: dict) -> None:
    model = random_model(small_config("gpt", **changes), ParallelContext()).eval()
    tokens = stream(47)
    expected = math.fsum(brute_force(model, tokens, window, stride))
    for micro_batch_tokens in (1, 40, 10_000):
        losses = losses_of(model, tokens, window, stride, micro_batch_tokens)
        assert math.fsum(losses) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("num_targets", [1, 2, 12, 13, 14, 17, 18, 19, 100])
@pytest.mark.parametrize("window, stride", SHAPES)
def test_windows_score_every_target_once_with_the_longest_context(num_targets: int, window: int, stride: int) -> None:
    task, scored = wikitext(range(num_targets + 1), window, stride), []
    for first, num_read, num_scored in map(task.window_at, range(task.counts["windows"])):
        assert 1 <= num_scored <= num_read <= window
        scored += [(target, first) for target in range(first + num_read - num_scored, first + num_read)]
    assert scored == [(target, context_of(target, window, stride)) for target in range(num_targets)]


def test_a_text_without_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens, but has 1"):
        wikitext([7], 5, 2)


def test_window_counts_of_published_texts_equal_megatrons_and_the_papers() -> None:
    validation, test = (wikitext(range(num_targets + 1), 1024, 32).counts for num_targets in (236_891, 270_329))
    assert (validation["windows"], validation["windows_megatron"], test["windows_megatron"]) == (7_372, 7_403, 8_448)


def test_the_perplexity_of_a_uniform_model_has_a_closed_form() -> None:
    model = zero_model(small_config("gpt", vocab_size=61))  # 64 rows: padded ones must not count
    loss_sum = math.fsum(losses_of(model, stream(38, 61), 13, 5))
    for count in (11, 10, 37):
        assert perplexity(loss_sum, count) == pytest.approx(61 ** (37 / count), rel=1e-12)


def test_an_oracle_has_perplexity_one() -> None:
    cycle = list(range(1, 24)) + [0]
    losses = losses_of(oracle(cycle), [index % 24 for index in range(71)], 13, 5)
    assert perplexity(math.fsum(losses), 9) == 1.0


def test_an_infinite_perplexity_is_not_an_error() -> None:
    losses = losses_of(oracle(list(range(1, 24)) + [0]), [0, 2, 4] * 9, 13, 5)
    assert perplexity(math.fsum(losses), 9) == math.inf


def test_the_formulas_equal_the_papers_and_its_codes() -> None:
    task = wikitext(range(6), 13, 5)  # of four words
    found = {name: value for name, (value, _) in task.metrics([[2.0], [3.5], [0.25]]).items()}
    assert found["wikitext103/perplexity"] == math.exp(5.75 / 4)
    as_in_code = math.exp(5.75 / 5 * (5 / 3))  # loss a target, times targets a word less one
    assert found["wikitext103/perplexity_megatron"] == pytest.approx(as_in_code, rel=1e-14)
    assert found["wikitext103/perplexity_token"] == math.exp(5.75 / 5)
    assert perplexity(1.0, 0) == math.inf  # Megatron-LM has no formula for a single word


def test_a_nan_loss_raises_with_its_window() -> None:
    model = random_model(small_config("gpt"), ParallelContext()).eval()
    with torch.no_grad():
        model.transformer.word_embedding.weight[3] = math.nan
    with pytest.raises(ValueError, match="must be a number, but that of window 0 is nan"):
        losses_of(model, [3] * 40, 13, 5)


def layout_losses(rank: int, window: int, stride: int) -> list[list[float]]:
    found = []
    for tp_size in (1, 2, 4):
        context = make_context(tp_size, WORLD // tp_size)
        model = random_model(small_config("gpt"), context).eval()
        found.append(losses_of(model, stream(97), window, stride))
    return found


def test_losses_are_the_same_at_every_layout_and_on_every_rank() -> None:
    expected = losses_of(random_model(small_config("gpt"), ParallelContext()).eval(), stream(97), 13, 5)
    by_rank = run_ranks(layout_losses, WORLD, 13, 5)
    assert all(found == by_rank[0] for found in by_rank)
    assert by_rank[0][0] == expected  # data ranks: the same batches, so the same bits
    for found in by_rank[0][1:]:
        assert found == pytest.approx(expected, rel=1e-12)


@torch.inference_mode()
def transformers_loss(folder, tokens: list[int], window: int, stride: int) -> float:
    """The usual strided evaluation with a published model: labels that were scored before are ignored."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total, end = 0.0, 0
    for begin in itertools.count(0, stride):
        stop = min(begin + window, len(tokens) - 1)
        chunk = torch.tensor([tokens[begin : stop + 1]])
        logits = model(chunk[:, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, chunk[0, 1:], reduction="none")
        total += losses[end - begin :].sum().item()
        end = stop
        if end == len(tokens) - 1:
            return total


def test_plain_transformers_code_gives_the_same_loss_for_the_exported_model(tmp_path) -> None:
    model = random_model(small_config("gpt"), ParallelContext())
    with torch.no_grad():
        model.transformer.word_embedding.weight[99:] = 0.0
    path = save_gpt(tmp_path / "ours", model, tp_size=2)
    published = export_hugging_face(path, tmp_path / "published")
    tokens = stream(201)
    for source in (path, published):
        loaded = load_model(source, ParallelContext(), torch.float64)
        ours = math.fsum(losses_of(loaded.model, tokens, 13, 4))
        assert ours == pytest.approx(transformers_loss(published, tokens, 13, 4), rel=1e-12)
