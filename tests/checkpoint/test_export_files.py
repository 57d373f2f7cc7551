"""Files beside an exported model: the tokenizer's, read and copied with their settings, and the model card."""

import json
from pathlib import Path

import pytest
import yaml
from checkpoints import BERT, family_config

from lmscale.checkpoint import CheckpointError
from lmscale.checkpoint.metadata import CheckpointMetadata
from lmscale.checkpoint.model_card import model_card
from lmscale.checkpoint.tokenizer_files import TokenizerFiles
from lmscale.config import TransformerConfig
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
    (tmp_path / "merges.txt").touch()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"`tokenizer_path` must name valid files, .*{name} must be ") as caught:
        TokenizerFiles(tmp_path, CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "merges.txt", "tokenizer_config.json"])
def test_a_folder_without_a_vocabulary_is_no_tokenizer(tmp_path, name: str) -> None:
    (tmp_path / (name or "unknown")).write_text("{}")
    with pytest.raises(CheckpointError, match="`tokenizer_path` must be a tokenizer.json, a vocab.txt or a folder"):
        TokenizerFiles(tmp_path, CONFIG)
    (tmp_path / "vocab.json").write_text("{}")
    if name != "merges.txt":
        with pytest.raises(CheckpointError, match="`tokenizer_path` must have merges.txt beside vocab.json, but "):
            TokenizerFiles(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match="but is .*nowhere"):
        TokenizerFiles(tmp_path / "nowhere", CONFIG)


GPT = TransformerConfig("gpt", 3, 24, 2, 1999, 32)
RUN = {
    "name": "gpt_mine",
    "data": {"kind": "local", "path": "/home/somebody/books.txt", "seq_length": 32},
    "global_batch_size": 1024,
    "trainer": {"max_steps": 3000},
    "optimizer": {"lr": 1.5e-4},
    "precision": {"dtype": "bf16"},
    "seed": 7,
}


def metadata(**changes: object) -> CheckpointMetadata:
    values = {"step": 2000, "layout": {}, "model": {}, "tensors": {}, "files": {}, "optimizer": {}, "run": RUN}
    return CheckpointMetadata(**values | {"state": {"validation": {"val/loss": 3.21987}}} | changes)


def rows(card: str) -> dict[str, str]:
    lines = [line for line in card.splitlines() if line.startswith("| ") and line != "| | |"]
    return dict(line.strip("| ").split(" | ", 1) for line in lines)


def test_the_card_has_sizes_data_steps_losses_and_how_to_load() -> None:
    card = model_card(metadata(), GPT, "GPT2LMHeadModel", "float32", "me/gpt_mine")
    found = rows(card)
    assert found["layers"] == "3" and found["hidden size"] == "24" and found["vocabulary"] == "1,999"
    assert found["data"] == "local, books.txt" and "/home" not in card
    assert found["steps"] == "2,000 of 3,000" and found["batch"] == "1,024 sequences of 32 tokens"
    assert found["val/loss"] == "3.2199" and found["learning rate"] == "0.00015" and found["seed"] == "7"
    assert 'model = GPT2LMHeadModel.from_pretrained("me/gpt_mine")' in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert "\n# license: choose one" in card


def test_an_imported_model_s_card_says_where_it_is_from() -> None:
    bert = TransformerConfig("bert", 3, 24, 2, 1999, 32)
    imported = metadata(run={"converted_from": "/models/minilm"}, state={}, step=0)
    card = model_card(imported, bert, "BertForPreTraining", "float16", "published")
    assert rows(card)["imported from"] == "minilm"
    assert "pipeline_tag: fill-mask" in card and "## Validation" not in card and "# published\n" in card
