"""Published tokenizers: every setting of their files is honoured as in transformers, or refused."""

import json
import random
import re
import time
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from sharding import small_config
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from lmscale.checkpoint import CheckpointError
from lmscale.checkpoint.tokenizer_files import TokenizerFiles
from lmscale.config.data import TokenizerConfig
from lmscale.data.tokenizer import BERT_SPECIALS, END_OF_TEXT, Tokenizer, load_published_tokenizer
from lmscale.data.tokenizer import published as published_files

NUM_TEXTS, FEWER_TEXTS = 4000, 200
WORDS = ("The", "the", "Café", "cafe", "NewWord", "newword", "中文", "don't", "İstanbul", "ΑΣ", "Åse", "한국어", "x y")
ADDED = {"content": "NewWord", "lstrip": False, "rstrip": False, "single_word": False, "special": False}


@cache
def characters() -> dict[str, list[str]]:
    """Up to 60 characters of each Unicode category, and all that Latin text uses."""
    found: dict[str, list[str]] = {"ASCII": [chr(code) for code in range(128)] + ["é", "Ü", "ß", "ç"]}
    for code in range(0x110000):
        found.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    found.pop("Cs")  # surrogates are no text
    draw = random.Random(1)
    return {name: draw.sample(held, min(len(held), 60)) for name, held in found.items() if name != "ASCII"} | {
        "ASCII": found["ASCII"]
    }


@cache
def random_texts() -> list[str]:
    """Texts of words and of characters of every category."""
    draw, pools = (
        random.Random(2),
        [*characters().values(), *[characters()["ASCII"]] * 9, [*WORDS, *BERT_SPECIALS, " "]],
    )
    return ["".join(draw.choice(draw.choice(pools)) for _ in range(draw.randrange(1, 24))) for _ in range(NUM_TEXTS)]


@cache
def wordpieces() -> list[str]:
    """A vocabulary that shows each change of a character: as it is, lower-cased, and without its accents."""
    plain = {letter for pool in characters().values() for letter in pool}
    plain |= {letter for word in WORDS for letter in word}
    for change in (str.lower, lambda letter: unicodedata.normalize("NFD", letter)):
        plain |= {part for letter in plain for part in change(letter)}
    letters = sorted(letter for letter in plain if not letter.isspace())
    words = ["the", "The", "cafe", "café", "Café", "中文", "newword"]
    return [*BERT_SPECIALS, *letters, *(f"##{letter}" for letter in letters), *words]


@cache
def byte_pairs() -> tuple[dict[str, int], list[str]]:
    """All bytes, and a few merges."""
    merges = ["t h", "Ġ t", "Ġt h", "Ġth e", "c a", "Ã ©", "T h", "Th e", "n e"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    return {token: index for index, token in enumerate(tokens)}, merges


def write_bert(folder: Path, **files: Any) -> Path:
    """A folder with a `vocab.txt` and more files as JSON; `config` is that of the tokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))  # for AutoTokenizer
    (folder / "vocab.txt").write_text("\n".join(wordpieces()) + "\n", encoding="utf-8", newline="\n")
    return write_json(folder, files)


def write_gpt2(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    vocab, merges = byte_pairs()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    return write_json(folder, files)


def write_json(folder: Path, files: dict[str, Any]) -> Path:
    names = {
        "config": "tokenizer_config",
        "special": "special_tokens_map",
        "added": "added_tokens",
        "whole": "tokenizer",
    }
    for name, values in files.items():
        (folder / f"{names[name]}.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def load(kind: str, path: Path) -> Tokenizer:
    return load_published_tokenizer(TokenizerConfig(kind, path=str(path)))


def theirs(folder: Path) -> Any:
    # Ours encodes special tokens that occur in a text as ordinary characters.
    return AutoTokenizer.from_pretrained(folder, split_special_tokens=True)


def check_equal(ours: Tokenizer, folder: Path, num_texts: int) -> None:
    """Equal ids for every text, and equal numbers of ids."""
    auto, texts = theirs(folder), random_texts()[:num_texts]
    expected = [encoding.ids for encoding in auto.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    assert auto(texts[:50], add_special_tokens=False)["input_ids"] == expected[:50]
    wrong = [text for text, ids, right in zip(texts, ours.encode_batch(texts), expected, strict=True) if ids != right]
    assert wrong == []
    assert ours.vocab_size == len(auto)


BERT_SETTINGS = {
    "none": {},
    "uncased": {"config": {"do_lower_case": True, "model_max_length": 512}},
    "cased": {"config": {"do_lower_case": False, "tokenizer_class": "BertTokenizer"}},
    "multilingual": {"config": {"do_lower_case": False, "strip_accents": None, "tokenize_chinese_chars": True}},
    "keys without effect": {
        "config": {
            **{"wordpieces_prefix": "##", "padding": "max_length", "truncation": True, "from_slow": True},
            **{"return_token_type_ids": True, "mask_padding_with_zero": True, "device_map": "auto"},
        }
    },
    "accents kept": {"config": {"do_lower_case": True, "strip_accents": False}},
    "accents alone": {"config": {"do_lower_case": False, "strip_accents": True}},
    "Chinese words": {"config": {"tokenize_chinese_chars": False}},
    "added": {"config": {"added_tokens_decoder": {str(len(wordpieces())): {**ADDED, "normalized": True}}}},
    "added before the normalizer": {
        "config": {
            "do_lower_case": False,
            "added_tokens_decoder": {
                "0": {**ADDED, "content": "[PAD]", "normalized": False, "special": True},
                str(len(wordpieces())): {**ADDED, "normalized": False, "lstrip": True, "rstrip": True},
            },
        }
    },
    "added in a file of its own": {
        "added": {"NewWord": len(wordpieces()), "[E]": len(wordpieces()) + 1},
        "special": {"additional_special_tokens": ["[E]"], "unk_token": {"content": "[UNK]", "lstrip": False}},
    },
}
GPT2_SETTINGS = {
    "none": {},
    "published": {"config": {"model_max_length": 1024}},
    "prefix space": {"config": {"add_prefix_space": True, "tokenizer_class": "GPT2TokenizerFast"}},
    "added": {"config": {"added_tokens_decoder": {str(len(byte_pairs()[0])): {**ADDED, "normalized": True}}}},
}
PUBLISHED = ("uncased", "cased", "multilingual", "published")  # these are compared on all texts


@pytest.mark.parametrize(
    "kind, name", [("bert", name) for name in BERT_SETTINGS] + [("gpt2", name) for name in GPT2_SETTINGS]
)
def test_a_vocabulary_with_settings_encodes_as_in_transformers(tmp_path, kind: str, name: str) -> None:
    if kind == "bert":
        folder = write_bert(tmp_path / "theirs", **BERT_SETTINGS[name])
        path = folder / "vocab.txt"
        assert load(kind, folder).fingerprint == load(kind, path).fingerprint
    else:
        path = folder = write_gpt2(tmp_path / "theirs", **GPT2_SETTINGS[name])
    check_equal(load(kind, path), folder, NUM_TEXTS if name in PUBLISHED else FEWER_TEXTS)
    theirs(folder).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    (tmp_path / "saved" / "config.json").write_bytes((folder / "config.json").read_bytes())
    check_equal(load(kind, tmp_path / "saved"), tmp_path / "saved", FEWER_TEXTS)


@pytest.mark.parametrize("kind, name", [("bert", "bert-uncased"), ("gpt2", "gpt2-bpe")])
def test_the_published_vocabularies_encode_as_in_transformers(tmp_path, shared_data, kind: str, name: str) -> None:
    names = {"vocab.txt": "vocab.txt", "encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}  # of OpenAI, of theirs
    for file in (shared_data / name).iterdir():
        (tmp_path / names[file.name]).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    check_equal(load(kind, shared_data / name), tmp_path, NUM_TEXTS)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"do_lower_case": "no"}, "`do_lower_case` of {}/tokenizer_config.json must be true or false, but is 'no'"),
        ({"do_basic_tokenize": False}, "`do_basic_tokenize` of {}/tokenizer_config.json must be True, but is False"),
        ({"never_split": ["NewWord"]}, "`never_split` of {}/tokenizer_config.json must be []"),
        ({"add_prefix_space": True}, "`add_prefix_space` of {}/tokenizer_config.json must be False, but is True"),
        ({"unk_token": "<unk>"}, "`unk_token` of {}/tokenizer_config.json must be [UNK], but is '<unk>'"),
        ({"cls_token": {"content": "<s>"}}, "`cls_token` of {}/tokenizer_config.json must be [CLS], but is"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "`tokenizer_class` of {}/tokenizer_config.json must be Bert"),
        (
            {"word_tokenizer_type": "mecab", "do_nothing": None, "jumanpp_kwargs": {"a": 1}},
            "{}/tokenizer_config.json has keys not known here: `jumanpp_kwargs` ({{'a': 1}}), `word_tokenizer_",
        ),
        ({"wordpieces_prefix": "@@"}, "`wordpieces_prefix` of {}/tokenizer_config.json must be ##, but is '@@'"),
        (
            {"added_tokens_decoder": {"99999": ADDED}},
            "`added_tokens_decoder` of {}/tokenizer_config.json must give 'NewWord' the next free id, ",
        ),
        (
            {"added_tokens_decoder": {"7": {"wide": 1}}},
            "`added_tokens_decoder` of {}/tokenizer_config.json must give a",
        ),
        ({"additional_special_tokens": 5}, "`additional_special_tokens` of {}/tokenizer_config.json must list tokens"),
        ({"added_tokens_decoder": ["NewWord"]}, "`added_tokens_decoder` of {}/tokenizer_config.json must give a token"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_its_name(tmp_path, settings, message: str) -> None:
    refuse("bert", write_bert(tmp_path / "theirs", config=settings) / "vocab.txt", message.format(tmp_path / "theirs"))


@pytest.mark.parametrize("key", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
def test_gpt2_has_no_settings_of_bert(tmp_path, key: str) -> None:
    folder = write_gpt2(tmp_path / "theirs", config={key: True})
    refuse("gpt2", folder, f"`{key}` of {folder}/tokenizer_config.json must be False, but is True")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"do_lower_case": True}, "`do_lower_case` of {} must be False, as in tokenizer.json, but is True"),
        ({}, "`do_lower_case` of {} must be False, as in tokenizer.json, but is 'not set'"),  # true in transformers
        ({"do_lower_case": False, "strip_accents": True}, "`strip_accents` of {} must be None, as in tokenizer.json"),
        (
            {"do_lower_case": True, "tokenizer_class": "PreTrainedTokenizerFast"},
            "`do_lower_case` of {} must be False, as in tokenizer.json, but is True",
        ),
        (
            {"do_lower_case": False, "added_tokens_decoder": {"5": ADDED}},
            "`added_tokens_decoder` of {} must list {{}}, as in tokenizer.json, but is {{5: 'NewWord'}}",
        ),
        ({"do_lower_case": False}, None),
        ({"tokenizer_class": "TokenizersBackend"}, None),
        (None, None),
    ],
)
def test_settings_that_contradict_a_tokenizer_json_are_refused(tmp_path, settings, message: str | None) -> None:
    cased = load("bert", write_bert(tmp_path / "vocabulary", config={"do_lower_case": False}))
    (tmp_path / "whole").mkdir()
    cased.inner.save(str(tmp_path / "whole" / "tokenizer.json"))
    write_json(tmp_path / "whole", {} if settings is None else {"config": settings})
    for path in (tmp_path / "whole", tmp_path / "whole" / "tokenizer.json"):
        if message is None:
            assert load("bert", path).fingerprint == cased.fingerprint
        else:
            refuse("bert", path, message.format(tmp_path / "whole" / "tokenizer_config.json"))


def test_a_vocabulary_beside_another_tokenizer_json_is_refused(tmp_path) -> None:
    folder = write_bert(tmp_path / "theirs")
    load("bert", folder).inner.save(str(folder / "tokenizer.json"))
    assert load("bert", folder / "vocab.txt").fingerprint == load("bert", folder).fingerprint
    cased = load("bert", write_bert(tmp_path / "cased", config={"do_lower_case": False}))
    cased.inner.save(str(folder / "tokenizer.json"))
    assert load("bert", folder).fingerprint == cased.fingerprint
    message = (
        f"`tokenizer.path` must be {folder}, because its tokenizer.json is a different tokenizer, but is {folder}/vocab"
    )
    refuse("bert", folder / "vocab.txt", message)


@pytest.mark.parametrize("num_lines", [0, 1, 8])
def test_merges_that_end_early_at_a_line_end_are_refused(tmp_path, num_lines: int) -> None:
    folder, (_, merges) = write_gpt2(tmp_path / "theirs"), byte_pairs()
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges[:num_lines]]) + "\n", encoding="utf-8")
    first = merges[num_lines].replace(" ", "")
    message = f"{folder}/merges.txt must have a merge for each token of {folder}/vocab.json, but lacks "
    message += f"{len(merges) - num_lines}, the first for {first!r}; "
    refuse("gpt2", folder, message)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        TokenizerFiles(folder, small_config("gpt", vocab_size=1024))


@pytest.mark.parametrize("form", [list, " ".join])
def test_a_whole_tokenizer_that_has_lost_merges_is_refused(tmp_path, form) -> None:
    """As in the two ways that the library has written them."""
    path, (_, merges) = tmp_path / "tokenizer.json", byte_pairs()
    spec = json.loads(load("gpt2", write_gpt2(tmp_path / "theirs")).inner.to_str())
    for kept in (len(merges), 8, 0):
        spec["model"]["merges"] = [form(merge.split(" ")) for merge in merges[:kept]]
        path.write_text(json.dumps(spec), encoding="utf-8")
        if kept == len(merges):
            load("gpt2", path)
            continue
        first = merges[kept].replace(" ", "")
        message = f"{path} must have a merge for each of its tokens, but lacks {len(merges) - kept}, the first for "
        refuse("gpt2", path, message + repr(first))


def test_tokens_without_a_merge_are_special_or_added(tmp_path) -> None:
    folder, (vocab, _) = write_gpt2(tmp_path / "theirs"), byte_pairs()
    (folder / "vocab.json").write_text(json.dumps(vocab | {"<pad>": len(vocab), "NewWord": len(vocab) + 1}))
    refuse(
        "gpt2", folder, "but lacks 1, the first for 'NewWord'; copy it whole, or list tokens that need none in added"
    )
    write_json(folder, {"added": {"NewWord": len(vocab) + 1}})
    check_equal(load("gpt2", folder), folder, FEWER_TEXTS)
    assert TokenizerFiles(folder, small_config("gpt", vocab_size=1024)).ids["NewWord"] == len(vocab) + 1


@pytest.mark.parametrize(
    "kind, other, tokens", [("bert", "gpt2", ", ".join(BERT_SPECIALS)), ("gpt2", "bert", END_OF_TEXT)]
)
def test_a_tokenizer_of_another_family_is_refused(tmp_path, kind: str, other: str, tokens: str) -> None:
    """It would encode every text without an error."""
    folder = {"bert": write_bert, "gpt2": write_gpt2}[other](tmp_path / "other")
    load(other, folder).inner.save(str(tmp_path / "tokenizer.json"))
    rule = f"`tokenizer.path` must be a tokenizer that suits a {kind.strip('2')}, with {tokens}, but "
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}.*, which suits a {other.strip('2')}, lacks "):
        load(kind, tmp_path / "tokenizer.json")


def test_a_tokenizer_that_draws_its_merges_is_refused(tmp_path) -> None:
    spec = json.loads(load("gpt2", write_gpt2(tmp_path / "theirs")).inner.to_str())
    spec["model"]["dropout"] = 0.1
    write_json(tmp_path, {"whole": spec})
    refuse("gpt2", tmp_path, f"`dropout` of {tmp_path}/tokenizer.json must be null, but is 0.1")


def refuse(kind: str, path: Path, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(kind, path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "end, mark, rest", [("\n", "", ""), ("\r\n", "", ""), ("\n", "\ufeff", "\n\n"), ("\r\n", "\ufeff", "\r\n")]
)
def test_lines_of_a_vocabulary_end_at_lf_alone(tmp_path, end: str, mark: str, rest: str) -> None:
    tokens = [*BERT_SPECIALS, "\u2028", "\x85", "\x0b", "中", "the"]
    (tmp_path / "vocab.txt").write_bytes((mark + end.join(tokens) + end + rest).encode())
    assert load("bert", tmp_path).inner.get_vocab() == {token: index for index, token in enumerate(tokens)}
    vocab, merges = byte_pairs()
    (tmp_path / "vocab.json").write_text(mark + json.dumps(vocab) + rest, encoding="utf-8", newline="")
    (tmp_path / "merges.txt").write_bytes((mark + end.join(["#version: 0.2", *merges]) + end + rest).encode())
    plain = load("gpt2", write_gpt2(tmp_path / "plain"))
    assert load("gpt2", tmp_path).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    "kind, name, content",
    [
        ("bert", "vocab.txt", b""),
        ("bert", "vocab.txt", b"[PAD]\n[CLS]\n\xff\n"),
        ("bert", "vocab.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 231508\n"),
        ("bert", "tokenizer_config.json", b"version https://git-lfs.github.com/spec/v1\n"),
        ("bert", "tokenizer_config.json", b"[]"),
        ("bert", "added_tokens.json", b"{"),
        ("bert", "added_tokens.json", b'{"a": 1, "b": "2"}'),
        ("gpt2", "vocab.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1042301\n"),
        ("gpt2", "vocab.json", b""),
        ("gpt2", "vocab.json", b'{"a": "b"}'),
        ("gpt2", "vocab.json", b'{"a": 0}'),  # has no tokens for the merges
        ("gpt2", "merges.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 456318\n"),
        ("gpt2", "merges.txt", b"#version: 0.2\nt h\n\nc a\n"),
        ("gpt2", "merges.txt", b"\x80"),
        ("gpt2", "tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n"),
        ("gpt2", "tokenizer.json", b'{"model": {"type": "BPE"'),
    ],
)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(tmp_path, kind: str, name: str, content: bytes) -> None:
    folder = (write_bert if kind == "bert" else write_gpt2)(tmp_path / "theirs")
    (folder / name).write_bytes(content)
    message = f"{folder / name} must "
    if content == b'{"a": 0}':
        message = f"must hold merges of the tokens of {folder / name}, but: "
    elif name == "vocab.txt" and content.isascii():
        message = f"must have the token [UNK] in its vocabulary, but {folder} lacks it"
    refuse(kind, folder, message)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def test_settings_of_a_tokenizer_of_the_hub_are_honoured(hub_cache) -> None:
    folder = hub_cache / "models--me--cased"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    written = write_bert(folder / "snapshots" / ("0" * 40), config={"do_lower_case": False})
    ours = load_published_tokenizer(TokenizerConfig("bert", name="me/cased"))
    assert ours.fingerprint == load("bert", written).fingerprint


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_tokenizer_that_cannot_be_downloaded_is_refused_at_once(hub_cache, monkeypatch, is_offline: bool) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    start = time.perf_counter()
    with pytest.raises(ValueError) as caught:
        load_published_tokenizer(TokenizerConfig("gpt2"))
    assert time.perf_counter() - start < 5  # the client's retries take 30 s
    reason = "HF_HUB_OFFLINE is set" if is_offline else "http://127.0.0.1:9 cannot be reached"
    assert str(caught.value) == (
        f"`tokenizer.name` must be in the cache of the Hugging Face hub where {reason}, but 'openai-community/gpt2' is "
        "not; tokenizer.path takes local files"
    )


def test_an_error_of_the_hub_without_a_message_is_named_by_its_type(hub_cache, monkeypatch) -> None:
    def snapshot_download(name: str, local_files_only: bool = False, **more: object) -> str:
        raise ValueError if local_files_only else RuntimeError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(published_files, "can_reach_hub", lambda: True)
    with pytest.raises(ValueError, match="or in its cache, but 'openai-community/gpt2': RuntimeError; tokenizer.path"):
        load_published_tokenizer(TokenizerConfig("gpt2"))
