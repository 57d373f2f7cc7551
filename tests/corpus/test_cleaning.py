"""Cleaning: repair equal to ftfy's, joined lines, and the filters with their counts."""

import gzip
import json
import pickle
import re
import tarfile
import time
from functools import partial
from pathlib import Path

import ftfy
import pytest
import tokenizers
from datatrove.data import Document
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmscale.config.data import TokenizerConfig
from lmscale.corpus import cleaning
from lmscale.corpus.cleaning import (
    DropDocuments,
    EditText,
    join_story_lines,
    judge_language,
    judge_length,
    repair_text,
    token_test,
)
from lmscale.data.tokenizer import load_published_tokenizer, read_tokenizer, train_tokenizer


def documents(texts: list[str]) -> list[Document]:
    return [Document(t, f"id{i}", metadata={"source": "s", "file": "f", "row": i}) for i, t in enumerate(texts, 1)]


def totals(step: object) -> dict[str, int]:
    return {name: stat.total for name, stat in step.stats.stats.items()}


# repair


def test_mojibake_is_repaired_as_by_ftfy(shared_data) -> None:
    cases = [case for path in (shared_data / "mojibake").glob("*.json") for case in json.loads(path.read_text("utf-8"))]
    assert len(cases) == 81
    for case in cases:
        for text in (case["original"], case["fixed"]):
            assert repair_text(text) == ftfy.fix_text(text), case["label"]
    # All of them in one text, where a `<` in one line affects the entities of the next.
    whole = "\n".join(case["original"] for case in cases)
    assert repair_text(whole) == ftfy.fix_text(whole) != whole


def test_real_text_is_repaired_as_by_ftfy(shared_data) -> None:
    with gzip.open(shared_data / "race" / "race_dev.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["article"] for line in file][::12]
    with tarfile.open(shared_data / "newsgroups" / "20_newsgroups.shared.tar.gz") as archive:
        posts = [archive.extractfile(m).read() for i, m in enumerate(archive) if m.isfile() and i % 60 == 0]
    texts += [post.decode("latin-1").replace("\n", "\r\n") for post in posts[::2]]
    texts += [post.decode("latin-1") for post in posts[1::2]]
    repaired = [repair_text(text) for text in texts]
    assert repaired == [ftfy.fix_text(text) for text in texts]
    assert 15 < sum(a != b for a, b in zip(repaired, texts, strict=True)) < len(texts)


def test_every_character_is_repaired_as_by_ftfy() -> None:
    letters = [chr(i) for i in range(0x3000)] + [chr(i) for i in range(0x3000, 0x110000, 97)]
    letters += [chr(i) for i in range(0xD7F0, 0xE010)] + [chr(i) for i in range(0xF8F0, 0x10000)]
    for pattern, some in (("a{0}b", letters), ("{0}", letters[::4]), ("Ã{0} “{0}”", letters[::4])):
        text = "\n".join(pattern.format(letter) for letter in some)
        assert repair_text(text) == ftfy.fix_text(text)


ODD = "aé “”‘’ʼ&lt;&AMP;#<\n\r\x00\x1b[0m\x85\x9dÃÂâ€™œ¡°ﬁ３　\u2028\u0301\u0327ü\ufeff\ufffd\ud83d"


@given(st.text(alphabet=ODD, max_size=60) | st.text(max_size=30))
@example("&lt;\n<\n&lt;")
@example("â€œquoteâ€\x9d\n“fine”")
@example("“e\u0301”")
@example("’’Â\n’ ’")
@settings(max_examples=250, deadline=None)
def test_any_text_is_repaired_as_by_ftfy(text) -> None:
    assert repair_text(text) == ftfy.fix_text(text)


def test_lines_above_ftfys_maximum_length_are_split_as_by_ftfy() -> None:
    limit = cleaning.REPAIR.max_decode_length
    mixed, entity = "x" * (limit - 1) + "Ã©" + "<&lt;’" * 3, "&lt;" + "x" * limit + "<&lt;"
    for text in (mixed, entity, "“" * (limit + 5) + "\n&lt;", "5" * limit + "Ã  la"):
        assert repair_text(text) == ftfy.fix_text(text)


def test_ftfy_is_not_called_for_lines_it_would_not_change(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(ftfy, "fix_text", lambda text, config: asked.append(text) or text)
    plain = "Plain text & more; a <tag>.\n\tIndented.\f\n"
    assert repair_text(plain * 5) == plain * 5
    assert repair_text(plain + "“It’s naïve — café…”\nnext") == plain + '"It\'s naïve — café…"\nnext'
    assert asked == []
    repair_text(plain + "one &amp; two\n" + plain + "schÃ¶n\n" + plain + "\x07\n")
    assert asked == ["one &amp; two\n", "schÃ¶n\n", "\x07\n"]


def test_ftfy_is_called_where_straight_quotes_look_like_mojibake(monkeypatch) -> None:
    # No such text is known for the current ftfy, but a later version may find one.
    monkeypatch.setattr(cleaning, "is_bad", lambda text: "'" in text)
    monkeypatch.setattr(ftfy, "fix_text", lambda text, config: "asked")
    assert repair_text("it’s") == "asked" and repair_text("“café”") == '"café"'


def test_repaired_and_emptied_documents_are_counted() -> None:
    step = EditText("repair text", repair_text, "repaired")
    kept = list(step.run(documents(["plain", "schÃ¶n", "\x00\x07", "\ufeff \n"])))
    assert [(d.id, d.text) for d in kept] == [("id1", "plain"), ("id2", "schön")]
    assert totals(step) == {"repaired": 3, "empty": 2}


# CC-Stories


def joined_by_hand(text: str) -> str:
    """The rule character by character: breaks after a word, with one space after them, and runs of spaces."""
    result, i = "", 0
    while i < len(text):
        j = i
        if text[i] == "\n" and i > 0 and re.match(r"\w", text[i - 1]):
            while j < len(text) and text[j] == "\n":
                j += 1
            j += text[j : j + 1] == " "
        elif text[i : i + 2] == "  ":
            while j < len(text) and text[j] == " ":
                j += 1
        result += " " if j > i else text[i]
        i = max(j, i + 1)
    return result


def test_lines_within_a_paragraph_are_joined_and_paragraphs_are_kept() -> None:
    broken = "It was a dark\nand stormy  night in the\n house.\n\nThe next\n\nday came,\nat last.\n"
    assert join_story_lines(broken) == "It was a dark and stormy night in the house.\n\nThe next day came,\nat last.\n"


@given(st.text(alphabet="aé_.\n \t5", max_size=30))
@settings(max_examples=150, deadline=None)
def test_lines_are_joined_by_the_rule(text) -> None:
    assert join_story_lines(text) == joined_by_hand(text)


def test_only_the_named_sources_are_joined() -> None:
    rows = documents(["a\nb", "a\nb", "ab"])
    rows[1].metadata["source"] = "stories"
    rows[2].metadata["source"] = "stories"
    step = EditText("join lines", join_story_lines, "joined", ["stories"])
    assert [document.text for document in step.run(rows)] == ["a\nb", "a b", "ab"]
    assert totals(step) == {"joined": 1}


# length


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory, shared_data) -> dict[str, Path]:
    """tokenizer.json of the published GPT-2 and BERT tokenizers, of trained ones, and of one that spans words."""
    folder = tmp_path_factory.mktemp("tokenizers")
    text = ["the cat sat on the mat, naïve 123 456 !!! ... the the"] * 50
    spanning = tokenizers.Tokenizer(tokenizers.models.BPE())
    spanning.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spanning.train_from_iterator(text, tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    made = {
        "gpt2": load_published_tokenizer(TokenizerConfig("gpt2", path=str(shared_data / "gpt2-bpe")), "gpt").inner,
        "bert": load_published_tokenizer(TokenizerConfig("bert", path=str(shared_data / "bert-uncased")), "bert").inner,
        "trained bpe": train_tokenizer(text, "gpt", 300, "vocab_size"),
        "trained wordpiece": train_tokenizer(text, "bert", 60, "vocab_size"),
        "spanning": spanning,
    }
    for name, tokenizer in made.items():
        tokenizer.save(str(folder / f"{name}.json"))
    return {name: folder / f"{name}.json" for name in made}


# Characters that WordPiece drops or joins (lone accents, control and zero-width characters), that only Python considers
# spaces, or across which BPE may merge.
ODD_WORDS = "ab1é \t\n\r\x00\x0b\x0c\x1c\x85\u0301\u200b\u200d\ufeff\ufffd\u3000\u2028中😀!.'’<|endoftext|>[MASK]"


@pytest.mark.parametrize("name", ["gpt2", "bert", "trained bpe", "trained wordpiece", "spanning"])
def test_the_length_shortcut_agrees_with_tokenization(tokenizer_files, name) -> None:
    tokenizer = read_tokenizer(tokenizer_files[name])
    tests = {count: token_test(count, tokenizer_files[name]) for count in (1, 2, 3, 5, 8)}

    @given(st.text(alphabet=ODD_WORDS, max_size=40) | st.text(max_size=20))
    @example("the the the the the the the the")
    @example("a\x0bb a\x1cb \u0301 \u200b !\x1c! 1\u0301 2")
    @settings(max_examples=40, deadline=None)
    def check(text: str) -> None:
        # The reader has replaced surrogates.
        text = text.encode("utf-8", "replace").decode()
        length = len(tokenizer.encode_batch([text])[0])
        for count, is_long in tests.items():
            assert is_long(text) == (length >= count)

    check()


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_real_documents_near_the_threshold_are_tokenized(tokenizer_files, shared_data, name) -> None:
    tokenizer = read_tokenizer(tokenizer_files[name])
    lines = (shared_data / "lambada" / "lambada_test.shared.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    is_long = token_test(90, tokenizer_files[name])
    lengths = [len(ids) for ids in tokenizer.encode_batch(texts)]
    assert [is_long(text) for text in texts] == [length >= 90 for length in lengths]
    assert 0.05 < sum(length >= 90 for length in lengths) / len(lengths) < 0.95


def test_the_length_shortcut_is_used_only_where_it_is_exact(tokenizer_files) -> None:
    specs = {name: json.loads(path.read_text("utf-8")) for name, path in tokenizer_files.items()}
    found = {name: cleaning._shortcuts(spec) for name, spec in specs.items()}
    assert found["gpt2"] == (True, 128) and found["bert"] == (True, None)
    assert found["trained bpe"][0] and found["trained wordpiece"] == (True, None) and found["spanning"] == (False, None)
    for change in ({"content": "two words"}, {"lstrip": True}, {"rstrip": True}):
        added = [specs["bert"]["added_tokens"][0] | change]
        assert cleaning._shortcuts(specs["bert"] | {"added_tokens": added}) == (False, None)
    long = specs["gpt2"]["added_tokens"][0] | {"content": 200 * "x"}
    assert cleaning._shortcuts(specs["gpt2"] | {"added_tokens": [long]}) == (True, 200)
    vocab = {token: i for token, i in specs["gpt2"]["model"]["vocab"].items() if token != "a"}
    without = specs["gpt2"] | {"model": specs["gpt2"]["model"] | {"vocab": vocab}}
    assert cleaning._shortcuts(without) == (False, None)


@pytest.mark.parametrize("name", ["gpt2", "bert", "spanning"])
def test_a_tokenizer_with_truncation_or_padding_counts_whole_texts(tokenizer_files, tmp_path, name) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_files[name]))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(tmp_path / "cut.json"))
    is_long = token_test(10, tmp_path / "cut.json")
    assert is_long("... !!! " * 10) and not is_long(". !")


def test_a_long_line_without_spaces_is_not_tokenized(tokenizer_files) -> None:
    start = time.process_time()
    assert token_test(128, tokenizer_files["gpt2"])("x" * 10_000_000)
    assert token_test(128, None)("word. " * 2_000_000)
    assert not token_test(128, None)("x" * 10_000_000)
    assert time.process_time() - start < 3.0  # tokenizing the first would take minutes


def test_without_a_tokenizer_words_and_punctuation_are_counted() -> None:
    assert token_test(5, None)("It's one.") and not token_test(6, None)("It's one.")


def test_short_documents_are_dropped_and_counted(tokenizer_files) -> None:
    judge = partial(judge_length, 4, tokenizer_files["gpt2"])
    step = pickle.loads(pickle.dumps(DropDocuments("drop short", judge)))
    kept = list(step.run(documents(["one two three", "one two three four", "...", "a b c d e f"])))
    assert [document.id for document in kept] == ["id2", "id4"]
    assert totals(step) == {"short": 2, "kept": 2}


# language and samples

GERMAN = "Das Haus am See war alt und niemand wollte darin wohnen, bis eines Tages eine Frau mit drei Hunden kam."
ENGLISH = "The house by the lake was old and nobody wanted to live in it until a woman with three dogs came."


def keep(language: str, min_score: float, samples: Path | None = None) -> DropDocuments:
    return DropDocuments("keep the language", partial(judge_language, language, min_score), samples)


def test_documents_of_other_languages_are_dropped_by_reason() -> None:
    step = keep("en", 0.3)
    kept = list(step.run(documents([ENGLISH, GERMAN, "12 + 34 = 46 !", ENGLISH])))
    assert [document.id for document in kept] == ["id1", "id4"]
    assert totals(step) == {"kept": 2, "other_language": 1, "no_letters": 1}
    assert [d.id for d in keep("de", 0.3).run(documents([ENGLISH, GERMAN]))] == ["id2"]


def test_a_language_below_the_minimum_probability_is_dropped_as_unsure() -> None:
    step = keep("en", 1.0)
    assert list(step.run(documents([ENGLISH + " " + GERMAN[:40]]))) == []
    assert totals(step) == {"unsure": 1}


def test_the_first_dropped_documents_per_reason_are_saved(tmp_path) -> None:
    texts = [ENGLISH] + [f"{GERMAN} {i}" * 3 for i in range(30)] + ["123"]
    for _ in range(2):
        list(keep("en", 0.3, tmp_path / "language").run(documents(texts), rank=3))
    held = json.loads((tmp_path / "language" / "00003.json").read_text("utf-8"))
    assert [sample["row"] for sample in held["other_language"]] == list(range(2, 22))
    assert held["no_letters"] == [{"source": "s", "file": "f", "row": 32, "id": "id32", "text": "123"}]
    assert held["other_language"][0]["text"] == texts[1][: cleaning.SAMPLE_CHARACTERS]
