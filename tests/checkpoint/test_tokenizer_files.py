"""A tokenizer's files beside a model: counted as the tokenizer reads them, and copied with their settings."""

import json
from pathlib import Path

import pytest
from checkpoints import BERT, family_config

from lmscale.checkpoint import CheckpointError
from lmscale.checkpoint.tokenizer_files import TokenizerFiles
from lmscale.config.data import TokenizerConfig
from lmscale.data.tokenizer import BERT_SPECIALS, load_published_tokenizer

TOKENS = (*BERT_SPECIALS, "\u2028", "\x85", "the", "The")  # str.splitlines takes two of them for line ends
CONFIG = family_config(BERT, vocab_size=len(TOKENS))


def write_vocabulary(folder: Path, start: str = "", end: str = "\n", rest: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_bytes((start + end.join(TOKENS) + end + rest).encode())
    return folder / "vocab.txt"


@pytest.mark.parametrize("text", [{}, {"end": "\r\n"}, {"start": "\ufeff", "rest": "\n\n"}])
def test_ids_are_the_lines_that_the_tokenizer_counts(tmp_path, text) -> None:
    path = write_vocabulary(tmp_path / "tokenizer", **text)
    assert TokenizerFiles(path.parent, CONFIG).ids == {token: index for index, token in enumerate(TOKENS)}
    with pytest.raises(CheckpointError, match=f"must have ids below {len(TOKENS) - 1}, but .* has {len(TOKENS) - 1}"):
        TokenizerFiles(path.parent, family_config(BERT, vocab_size=len(TOKENS) - 1))


def test_a_vocabulary_is_copied_with_the_settings_beside_it(tmp_path) -> None:
    path = write_vocabulary(tmp_path / "tokenizer")
    (path.parent / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    TokenizerFiles(path, CONFIG).copy_to(tmp_path / "copy")
    copied = load_published_tokenizer(TokenizerConfig("bert", path=str(tmp_path / "copy")))
    assert copied.encode_batch(["The the"]) == [[TOKENS.index("The"), TOKENS.index("the")]]


def test_settings_are_written_only_where_a_tokenizer_json_has_none_beside_it(tmp_path) -> None:
    folder = write_vocabulary(tmp_path / "tokenizer").parent
    inner = load_published_tokenizer(TokenizerConfig("bert", path=str(folder))).inner
    (folder / "tokenizer.json").write_text(inner.to_str())
    TokenizerFiles(folder, CONFIG).copy_to(tmp_path / "without")
    written = json.loads((tmp_path / "without" / "tokenizer_config.json").read_text())
    assert written["pad_token"] == "[PAD]" and written["model_max_length"] == CONFIG.max_position_embeddings
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    TokenizerFiles(folder, CONFIG).copy_to(tmp_path / "with")
    assert (tmp_path / "with" / "tokenizer_config.json").read_text() == '{"tokenizer_class": "BertTokenizer"}'


@pytest.mark.parametrize(
    "name, content", [("vocab.txt", b"\xff"), ("vocab.json", b"["), ("tokenizer.json", b"version https://git-lfs")]
)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(tmp_path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"`tokenizer_path` must name valid files, .*{name} must be ") as caught:
        TokenizerFiles(tmp_path, CONFIG)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="`tokenizer_path` must be a tokenizer.json, a vocab.txt or a folder"):
        TokenizerFiles(tmp_path / "nowhere", CONFIG)
