"""Generation: cache against recomputation, batches against single rows, ours against transformers."""

import contextlib
import itertools

import pytest
import torch
from crafted import save_gpt
from ranks import make_context, run_ranks
from sharding import random_model, small_config
from torch import Tensor

from lmscale.config import TransformerConfig
from lmscale.config.generate import Sampling
from lmscale.evaluation import generate_job
from lmscale.evaluation.generation import Generator, in_batches
from lmscale.evaluation.prompts import Prompt, Row
from lmscale.hugging_face.conversion import export_hugging_face
from lmscale.models import GPT
from lmscale.models.key_value_cache import KeyValueCache
from lmscale.parallel import ParallelContext
from lmscale.runtime.ranks import Ranks
from lmscale.trained_model import load_model

PLAIN = ParallelContext()
FORMS = list(itertools.product(("pre", "post"), ("sdpa", "exact")))
GREEDY = Sampling(0)
PROMPTS = [(5, 98, 3), (7,), (1, 2, 3, 4, 5, 6, 7, 8), (7, 7), (50, 60, 70, 80, 90)]


def longer(**changes) -> TransformerConfig:
    return small_config("gpt", max_position_embeddings=24, **changes)


def varied_model(config: TransformerConfig, context: ParallelContext) -> GPT:
    """A random model whose most probable token changes from position to position."""
    model = random_model(config, context).eval()
    with torch.no_grad():
        model.transformer.position_embedding.mul_(8.0)
    return model


def make_rows(prompts=PROMPTS, num_new: int = 12, num_samples: int = 1) -> list[Row]:
    made = [Prompt("", f"line {i}", ids, num_new, 0) for i, ids in enumerate(prompts)]
    return [Row(prompt, sample) for prompt in made for sample in range(num_samples)]


def lengthened(model: GPT, rows: list[Row], sampling: Sampling = GREEDY, end_id: int | None = None) -> list[Row]:
    Generator(model, sampling, end_id, seed=3).extend(rows)
    return rows


def tokens_of(rows: list[Row]) -> list[list[int]]:
    return [row.tokens for row in rows]


@torch.inference_mode()
def full_logits(model: GPT, ids: list[int]) -> Tensor:
    """Logits after `ids`, recomputed without a cache."""
    return model(torch.tensor([ids]))[0, -1]


@pytest.mark.parametrize("norm_order, attention", FORMS)
def test_the_cache_equals_full_recomputation(norm_order: str, attention: str) -> None:
    model = varied_model(longer(norm_order=norm_order, attention=attention, qk_norm=attention == "sdpa"), PLAIN)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 99, (4, 24), generator=generator)
    cache = KeyValueCache(model.config, PLAIN, 3, 24, torch.float64)
    # Several tokens at once, of different numbers, on rows that already have different lengths; then one by one.
    lengths, order, worst = [0, 0, 0], [0, 1, 2], 0.0
    for counts in ([4, 1, 3], [1, 5, 2], "repeat row 1", [2, 2, 1, 3], *[[1, 1, 1, 1]] * 9):
        if counts == "repeat row 1":
            cache.select(torch.tensor([2, 1, 0, 1]))
            lengths, order = [lengths[i] for i in (2, 1, 0, 1)], [2, 1, 0, 1]
            continue
        tokens = torch.full((len(counts), max(counts)), 77)
        for row, count in enumerate(counts):
            tokens[row, :count] = ids[order[row], lengths[row] : lengths[row] + count]
        with torch.inference_mode():
            logits = model.next_token_logits(tokens, torch.tensor(counts), cache)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        assert cache.lengths.tolist() == lengths
        for row, length in enumerate(lengths):
            expected = full_logits(model, ids[order[row], :length].tolist())
            worst = max(worst, (logits[row, :99] - expected[:99]).abs().max().item())
            assert torch.isinf(logits[row, 99:]).all()
    assert worst < 1e-12


def test_a_cache_never_exceeds_its_capacity() -> None:
    model = varied_model(longer(), PLAIN)
    with pytest.raises(ValueError, match=r"`capacity` must be at most `max_position_embeddings` \(24\), but is 25"):
        KeyValueCache(model.config, PLAIN, 1, 25, torch.float64)
    cache = KeyValueCache(model.config, PLAIN, 1, 3, torch.float64)
    with pytest.raises(ValueError, match=r"at most `capacity` \(3\) tokens long, but would be 4"):
        model.next_token_logits(torch.ones(1, 4, dtype=torch.int64), torch.tensor([4]), cache)


def test_greedy_rows_equal_those_of_full_recomputation() -> None:
    model = varied_model(longer(), PLAIN)
    rows = lengthened(model, make_rows())
    for row in rows:
        ids = list(row.prompt.ids)
        for _ in range(row.prompt.num_new):
            ids.append(int(full_logits(model, ids).argmax()))
        assert row.tokens == ids[len(row.prompt.ids) :] and row.finish == "length"


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.5), Sampling(1.0, 9, 0.9)])
def test_a_row_does_not_depend_on_its_batch(sampling: Sampling) -> None:
    model = varied_model(longer(), PLAIN)
    together = tokens_of(lengthened(model, make_rows(num_samples=2), sampling, end_id=13))
    alone, pairs = make_rows(num_samples=2), make_rows(num_samples=2)[::-1]
    for row in alone:
        lengthened(model, [row], sampling, end_id=13)
    for batch in in_batches(pairs, 3):
        lengthened(model, batch, sampling, end_id=13)
    assert tokens_of(alone) == together == tokens_of(pairs)[::-1]
    assert len({len(tokens) for tokens in together}) > 1 or sampling.temperature == 0  # some ended before others


def test_samples_of_a_prompt_differ_and_are_reproducible() -> None:
    model = varied_model(longer(), PLAIN)
    first, again = (tokens_of(lengthened(model, make_rows(num_samples=3), Sampling(1.0))) for _ in range(2))
    assert first == again and len({tuple(tokens) for tokens in first}) == 15
    other = make_rows(num_samples=3)
    Generator(model, Sampling(1.0), None, seed=4).extend(other)
    assert all(a != b for a, b in zip(first, tokens_of(other), strict=True))


def test_end_of_text_ends_a_row_and_is_not_part_of_it() -> None:
    model = varied_model(longer(), PLAIN)
    whole = lengthened(model, make_rows())[2].tokens
    end = whole[4]
    row = lengthened(model, make_rows(), end_id=end)[2]
    assert row.tokens == whole[: whole.index(end)] and row.finish == "end_of_text"


def test_every_position_of_the_model_can_be_used() -> None:
    model = varied_model(longer(), PLAIN)
    row = lengthened(model, make_rows([(4, 2)], num_new=22))[0]
    assert len(row.tokens) == 22
    assert row.tokens[-1] == int(full_logits(model, [4, 2, *row.tokens[:-1]]).argmax())


def _lengthen_sharded(rank: int, tp_size: int) -> list:
    context = make_context(tp_size) if tp_size > 1 else PLAIN
    found = []
    for norm_order, sampling in itertools.product(("pre", "post"), (GREEDY, Sampling(1.2, 20, 0.95))):
        model = varied_model(longer(norm_order=norm_order), context)
        found.append(tokens_of(lengthened(model, make_rows(num_samples=2), sampling)))
    return found


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_gives_the_same_tokens_on_every_rank(tp_size: int) -> None:
    assert run_ranks(_lengthen_sharded, tp_size, tp_size) == [_lengthen_sharded(0, 1)] * tp_size


def _lengthen_checkpoint(rank: int, path, end_id: int | None) -> tuple[list, list]:
    loaded = load_model(path, make_context(2), torch.float64, ranks=Ranks(rank, 2))
    rows = lengthened(loaded.model, make_rows(), end_id=end_id)
    return tokens_of(rows), [row.finish for row in rows]


def test_greedy_output_equals_that_of_transformers_on_the_exported_model(tmp_path) -> None:
    from transformers import GPT2LMHeadModel

    model = varied_model(longer(num_layers=3), PLAIN)
    with torch.no_grad():
        model.transformer.word_embedding.weight[99:] = 0.0
    path = save_gpt(tmp_path / "ours", model, tp_size=2)
    export_hugging_face(path, tmp_path / "theirs")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "theirs", dtype=torch.float64).eval()
    expected, margins = [], []
    for ids in PROMPTS:
        output = theirs.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected.append(output.sequences[0, len(ids) :].tolist())
        best = torch.stack(output.logits)[:, 0].topk(2).values
        margins.append((best[:, 0] - best[:, 1]).min().item())
    assert min(margins) > 1e-6  # far above fp64's rounding: no tie decides
    assert len({token for tokens in expected for token in tokens}) > 8
    end = expected[2][3]
    model = load_model(path, PLAIN, torch.float64).model
    assert tokens_of(lengthened(model, make_rows())) == expected
    assert run_ranks(_lengthen_checkpoint, 2, path, None)[1][0] == expected
    # With an end-of-text token theirs ends with it, ours before it.
    cut = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in expected]
    assert tokens_of(lengthened(model, make_rows(), end_id=end)) == cut != expected


def test_a_batch_that_a_full_disk_does_not_take_is_refused_at_once(monkeypatch) -> None:
    monkeypatch.setattr(generate_job, "as_json", lambda row, _: row)
    out = open("/dev/full", "w")
    with pytest.raises(ValueError, match="`out` could not be written to its end: No space left on device"):
        generate_job._write(out, ["text"], None)
    with contextlib.suppress(OSError):  # what is buffered still cannot be written
        out.close()
