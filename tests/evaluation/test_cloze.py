"""LAMBADA: each passage once, the whole last word, at every layout, and equal to plain transformers code."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from crafted import lambada, oracle, predict_last_words, save_gpt, zero_model
from ranks import make_context, run_ranks
from sharding import random_model, small_config
from transformers import AutoModelForCausalLM

from lmscale.config import TransformerConfig
from lmscale.config.data import TokenizerConfig
from lmscale.config.zero_shot import LambadaConfig
from lmscale.data.tokenizer import Tokenizer, load_published_tokenizer, train_tokenizer
from lmscale.evaluation.lambada import Lambada, Passage, encode_passages, read_passages, stop_word_ids
from lmscale.hugging_face.conversion import export_hugging_face
from lmscale.parallel import ParallelContext
from lmscale.parallel.argmax import vocab_parallel_argmax
from lmscale.text.whole_file import TextFile, read_text_file

WORLD = 4


def positions(number: int) -> TransformerConfig:
    return small_config("gpt", max_position_embeddings=number)


def random_passages(number: int = 53) -> list[Passage]:
    """A prime number of them, of many lengths, some too long to share a batch."""
    draw = random.Random(3)
    made = []
    for line in range(1, number + 1):
        word = draw.choices(range(99), k=draw.choice([1, 1, 1, 2, 4]))
        context = draw.choices(range(99), k=draw.randint(1, 14 - len(word)))
        made.append(Passage(line, tuple(context), tuple(word)))
    return made


@torch.inference_mode()
def one_at_a_time(model, passage: Passage) -> tuple[float, list[bool]]:
    """Log-likelihood of the word and whether each token is the most probable one, a forward pass a token."""
    read, total, right = list(passage.context), 0.0, []
    for token in passage.word:
        scores = model(torch.tensor([read]))[0, -1].log_softmax(dim=-1)
        total += scores[token].item()
        right.append(int(scores.argmax()) == token)
        read.append(token)
    return total, right


def mended(passages: list[Passage], model) -> list[Passage]:
    """The same passages, in half of which some or all tokens of the word are what the model says."""
    made = []
    for passage in passages:
        word = list(passage.word)
        for place in range(len(word)):
            if passage.line % 4 < 2 or (passage.line % 4 == 2 and place == len(word) - 1):
                with torch.inference_mode():
                    word[place] = int(model(torch.tensor([[*passage.context, *word[:place]]]))[0, -1].argmax())
        made.append(Passage(passage.line, passage.context, tuple(word)))
    return made


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 100_000])
def test_every_word_is_scored_as_if_alone(micro_batch_tokens: int) -> None:
    model = random_model(small_config("gpt"), ParallelContext()).eval()
    passages = mended(random_passages(), model)
    answers = predict_last_words(model, passages, micro_batch_tokens)
    assert [answer.line for answer in answers] == [passage.line for passage in passages]
    kinds = set()
    for passage, answer in zip(passages, answers, strict=True):
        likelihood, right = one_at_a_time(model, passage)
        assert answer.log_likelihood == pytest.approx(likelihood, rel=1e-12)
        assert (answer.right, answer.last_token_right) == (all(right), right[-1])
        assert answer.right_filtered == answer.right
        kinds.add((len(right) > 1, all(right), right[-1]))
    assert kinds >= {(True, True, True), (True, False, True), (True, False, False), (False, True, True)}


def layout_answers(rank: int) -> list:
    whole = random_model(small_config("gpt"), ParallelContext()).eval()
    passages = mended(random_passages(), whole)
    found = []
    for tp_size in (1, 2, 4):
        context = make_context(tp_size, WORLD // tp_size)
        model = random_model(small_config("gpt"), context).eval()
        found.append(predict_last_words(model, passages, 40, banned=[5, 60]))
    return found


def test_every_passage_counts_once_at_every_layout() -> None:
    model = random_model(small_config("gpt"), ParallelContext()).eval()
    expected = predict_last_words(model, mended(random_passages(), model), 40, banned=[5, 60])
    by_rank = run_ranks(layout_answers, WORLD)
    assert all(found == by_rank[0] for found in by_rank)
    assert by_rank[0][0] == expected  # 53 passages over 4 data ranks, to the bit
    for answers in by_rank[0][1:]:
        for ours, theirs in zip(answers, expected, strict=True):
            assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, rel=1e-12)
            assert (ours.right, ours.last_token_right) == (theirs.right, theirs.last_token_right)
            assert ours.right_filtered == theirs.right_filtered


def test_an_oracle_predicts_every_word_and_a_uniform_model_none() -> None:
    cycle = list(range(1, 24)) + [0]
    passages = [Passage(line, (line, line + 1), (line + 2, line + 3)) for line in range(1, 20)]
    answers = predict_last_words(oracle(cycle), passages, 40)
    assert all(answer.right and answer.log_likelihood == 0.0 for answer in answers)
    passages = [Passage(1, (4,), (9, 0))]  # a uniform model's most probable token is the first of all, 0
    (answer,) = predict_last_words(zero_model(small_config("gpt")), passages, 40)
    assert (answer.right, answer.last_token_right) == (False, True)


def test_stop_words_are_excluded_only_as_first_token() -> None:
    model = oracle(list(range(1, 24)) + [0])
    with torch.no_grad():  # a second thought behind each token: the one after the next
        for token in range(24):
            model.transformer.layers[0].mlp.down.weight[(token + 2) % 24, token] = 0.5
    passages = [Passage(1, (3,), (4, 5)), Passage(2, (3,), (5, 6)), Passage(3, (2,), (3, 4)), Passage(4, (3,), (5, 4))]
    answers = predict_last_words(model, passages, 40, banned=[4])
    assert [answer.right for answer in answers] == [True, False, True, False]
    assert [answer.right_filtered for answer in answers] == [False, True, True, False]  # 4 may come second


def test_a_nan_likelihood_raises_with_its_line() -> None:
    model = random_model(small_config("gpt"), ParallelContext()).eval()
    with torch.no_grad():
        model.transformer.word_embedding.weight[3] = float("nan")
    with pytest.raises(ValueError, match="^the likelihood of every word must be a number, but that of line 1 is nan$"):
        predict_last_words(model, random_passages(), 40)


def test_ties_go_to_the_smallest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("-inf")] * 3])
    assert vocab_parallel_argmax(logits, ParallelContext()).tolist() == [1, 0]
    others = [torch.tensor([3.0]), torch.tensor([-1.0])]  # of rank 0: its largest logit, minus the id of that
    beside = SimpleNamespace(all_reduce=lambda x, _: torch.maximum(x, others.pop(0)))
    context = ParallelContext(tp_rank=1, tp_size=2, tp_communicator=beside)
    assert vocab_parallel_argmax(torch.tensor([[0.0, 3.0]]), context).tolist() == [1]


def text_file(*lines: str) -> TextFile:
    return TextFile("passages", "".join(line + "\n" for line in lines), "")


def test_both_forms_are_read_unchanged() -> None:
    rows = ['  "Go," said\n\nAnn', "It's  the   end"]
    read = read_passages(text_file(*(json.dumps({"text": row}) for row in rows)), "openai")
    assert read == [('"Go," said', "Ann"), ("It's  the", "end")]
    assert read_passages(text_file("`` go , '' said ann"), "original") == [("`` go , '' said", "ann")]


@pytest.mark.parametrize(
    "form, lines, message",
    [
        ("openai", ['{"text": "a b"}', '{"text": "a c"'], "must have JSON on each line, but passages, line 2"),
        ("openai", ['{"text": "a b"}', '{"txt": "a c"}'], 'must have {"text": ...} on each line, but passages, line 2'),
        ("openai", ['{"text": "alone"}'], "two words or more on each line, but passages, line 1"),
        ("openai", ["a passage of words"], "`task.form` must match the file, but is openai, and passages, line 1"),
        ("original", ['{"text": "a b"}'], "`task.form` must match the file, but is original, and passages, line 1"),
        ("original", ["two words", "", "two words"], "two words or more on each line, but passages, line 2"),
    ],
)
def test_a_line_of_another_form_raises_with_its_number(form: str, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("...", r"\.\.\.")):
        read_passages(text_file(*lines), form)


def test_a_passage_longer_than_the_positions_raises_with_its_line() -> None:
    fits = Passage(1, (1,) * 12, (5, 6))  # reads 13 tokens
    assert lambada([fits]).for_model(positions(13)).passages == [fits]
    rule = r"at most the model's positions \(13\) long, but file, line 2 has 14 tokens .*; task.truncate_left=true"
    with pytest.raises(ValueError, match=rule):
        lambada([fits, Passage(2, (1,) * 13, (5, 6))]).for_model(positions(13))


def test_a_long_passage_loses_its_first_tokens_on_request() -> None:
    fits, long = Passage(1, (1,) * 12, (5, 6)), Passage(2, (7, 8, *range(9, 21)), (5, 6, 7))
    task = lambada([fits, long], truncate_left=True)
    fitted = task.for_model(positions(13))  # the last 11 tokens, and 2 of the word, are read
    assert fitted.passages == [fits, Passage(2, tuple(range(10, 21)), (5, 6, 7), 3)]
    assert (fitted.counts["truncated"], task.for_model(positions(99)).counts["truncated"]) == (1, 0)
    assert fitted.counts["longest"] == task.counts["longest"] == 17  # of the file
    assert "truncated" not in lambada([fits, long]).for_model(positions(99)).counts
    with pytest.raises(ValueError, match=r"a word must leave a position .* \(3\) .*, but that of file, line 2 has 4"):
        lambada([Passage(2, (7, 8), (5, 6, 7, 8))], truncate_left=True).for_model(positions(3))


@pytest.fixture(scope="session")
def gpt2(shared_data) -> Tokenizer:
    return load_published_tokenizer(TokenizerConfig("gpt2", path=str(shared_data / "gpt2-bpe")), "gpt")


def test_the_published_passages_have_the_known_tokens(shared_data, gpt2: Tokenizer) -> None:
    file = read_text_file(shared_data / "lambada" / "lambada_test.shared.jsonl", "task.path")
    passages = encode_passages(read_passages(file, "openai"), gpt2)
    assert len(passages) == 2577
    assert sum(len(passage.word) > 1 for passage in passages) == 550
    texts = [json.loads(line)["text"] for line in file.text.splitlines()]
    whole = gpt2.encode_batch(texts)
    assert max(map(len, whole)) == 224
    differ = [p.line for p, ids in zip(passages, whole, strict=True) if [*p.context, *p.word] != ids]
    assert len(differ) == 2


@pytest.mark.parametrize("number, split", [(5_153, "test"), (2_577, "other")])
def test_the_published_file_is_known_by_its_number_of_passages(tmp_path, gpt2: Tokenizer, number, split) -> None:
    (tmp_path / "file").write_text("two words\n" * number)
    assert Lambada.read(LambadaConfig("lambada", str(tmp_path / "file"), "original"), gpt2).split == split


def test_banned_tokens_are_whole_stop_words(gpt2: Tokenizer) -> None:
    texts = [gpt2.decode([index]) for index in stop_word_ids(gpt2)]
    assert {" the", " The", " not", " nobody"} < set(texts) and " dog" not in texts
    assert all(text.startswith(" ") and text[1:].isalpha() for text in texts)


@torch.inference_mode()
def transformers_answers(folder: Path, rows: list[dict], tokenizer: Tokenizer) -> list[tuple[float, bool, bool]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = []
    for row in rows:
        start, word = row["text"].rsplit(" ", 1)
        prefix, target = tokenizer.encode_batch([start, " " + word])
        logits = model(torch.tensor([prefix + target])).logits[0, len(prefix) - 1 : -1]
        right = logits.argmax(dim=-1) == torch.tensor(target)
        likelihood = logits.log_softmax(dim=-1)[torch.arange(len(target)), torch.tensor(target)].sum()
        found.append((likelihood.item(), bool(right.all()), bool(right[-1])))
    return found


def test_plain_transformers_code_gives_the_same_answers_for_the_exported_model(tmp_path) -> None:
    texts = ["she said that the cat sat on the mat and he said no", "no cat sat on that mat , she said to the man"] * 5
    tokenizer = Tokenizer(train_tokenizer(texts, "gpt", 290, "size"))
    rows = [{"text": text[: 19 + 2 * i].rsplit(" ", 1)[0]} for i, text in enumerate(texts)]
    config = small_config("gpt", vocab_size=tokenizer.vocab_size, max_position_embeddings=64)
    model = random_model(config, ParallelContext()).eval()
    with torch.no_grad():
        model.transformer.word_embedding.weight[config.vocab_size :] = 0.0
        for param in model.parameters():
            param.copy_(param.float())  # as the checkpoint holds it
    published = export_hugging_face(save_gpt(tmp_path / "ours", model, tokenizer), tmp_path / "published")
    passages = encode_passages(read_passages(text_file(*map(json.dumps, rows)), "openai"), tokenizer)
    ours = predict_last_words(model, passages, 100)
    for answer, (likelihood, right, last) in zip(ours, transformers_answers(published, rows, tokenizer), strict=True):
        assert answer.log_likelihood == pytest.approx(likelihood, rel=1e-12)
        assert (answer.right, answer.last_token_right) == (right, last)
