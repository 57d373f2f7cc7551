"""Files beside an exported model: the tokenizer's, read and copied with their settings, and the model card."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from checkpoints import BERT, family_config
from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer

from lmscale.checkpoint import Checkpoint, CheckpointError, CheckpointMetadata
from lmscale.checkpoint.tokenizer_files import TokenizerFiles, find_tokenizer
from lmscale.config import TransformerConfig
from lmscale.config.data import TokenizerConfig
from lmscale.data.tokenizer import BERT_SPECIALS, load_published_tokenizer
from lmscale.hugging_face.model_card import losses_of, model_card

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


def write_whole(folder: Path, settings: dict | None, framed: bool = False, **normalizer: bool) -> Path:
    """A tokenizer.json, by default without [CLS] and [SEP] around inputs, as our runs had it."""
    inner = load_published_tokenizer(TokenizerConfig("bert", path=str(write_vocabulary(folder)))).inner
    (folder / "vocab.txt").unlink()
    inner.normalizer = normalizers.BertNormalizer(**normalizer)
    if not framed:
        inner.post_processor = None
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        for index, token in settings.get("added_tokens_decoder", {}).items():
            inner.add_tokens([AddedToken(**token)])
            assert inner.token_to_id(token["content"]) == int(index)
    inner.save(str(folder / "tokenizer.json"))
    return folder


WORD = {"content": "NewWord", "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]"}  # as we once wrote


@pytest.mark.parametrize(
    "settings, normalizer, name",
    [
        (None, {}, "BertTokenizer"),
        (None, {"lowercase": False}, "BertTokenizer"),
        (None, {"strip_accents": False, "handle_chinese_chars": False}, "BertTokenizer"),
        (None, {"clean_text": False}, "TokenizersBackend"),  # which no class has
        (PLAIN, {}, "TokenizersBackend"),
        (PLAIN | {"added_tokens_decoder": {str(len(TOKENS)): WORD | {"special": False}}}, {}, "TokenizersBackend"),
        ({"tokenizer_class": "BertTokenizer", "model_max_length": 512}, {}, "BertTokenizer"),
    ],
)
@pytest.mark.parametrize("framed", [False, True])
def test_any_tokenizer_json_of_a_bert_is_published_with_its_special_tokens(
    tmp_path, settings, normalizer, name, framed
) -> None:
    folder = write_whole(tmp_path / "tokenizer", settings, framed, **normalizer)
    config = family_config(BERT, vocab_size=len(TOKENS) + 1)
    TokenizerFiles(folder, config).copy_to(tmp_path / "copy")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "copy")
    ours = load_published_tokenizer(TokenizerConfig("bert", path=str(tmp_path / "copy")))
    assert ours.fingerprint == load_published_tokenizer(TokenizerConfig("bert", path=str(folder))).fingerprint
    assert type(theirs).__name__ == name and theirs.model_max_length == config.max_position_embeddings
    text, other = "The \x85the\x00 NewWord", "Thé the"
    (first, second), cls, sep = ours.encode_batch([text, other]), ours.id_of("[CLS]"), ours.id_of("[SEP]")
    assert theirs(text)["input_ids"] == [cls, *first, sep]
    pair = theirs(text, other)
    assert pair["input_ids"] == [cls, *first, sep, *second, sep]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert theirs.pad_token_id in (0, None)  # the file in `settings` may not name it
    if framed:
        assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_vocabulary_alone_gets_the_length_and_complete_settings_stay_as_they_are(tmp_path) -> None:
    path = write_vocabulary(tmp_path / "tokenizer")
    TokenizerFiles(path, CONFIG).copy_to(tmp_path / "copy")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert theirs.model_max_length == CONFIG.max_position_embeddings
    assert theirs("the", "The")["token_type_ids"] == [0, 0, 0, 1, 1]
    written = '{"tokenizer_class": "BertTokenizer", "do_lower_case": true, "model_max_length": 7}'
    (path.parent / "tokenizer_config.json").write_text(written)
    TokenizerFiles(path, CONFIG).copy_to(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer_config.json").read_text() == written


@pytest.mark.parametrize(
    "name, content",
    [
        ("vocab.txt", b"\xff"),
        ("vocab.json", b"["),
        ("tokenizer.json", b"version https://git-lfs"),
        ("tokenizer_config.json", b'{"tokenizer_class": "Bert'),
    ],
)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(tmp_path, name: str, content: bytes) -> None:
    (tmp_path / "merges.txt").touch()
    if name == "tokenizer_config.json":
        write_vocabulary(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"`tokenizer_path` must name valid files, .*{name} must be ") as caught:
        TokenizerFiles(tmp_path, CONFIG)
    assert "\n" not in str(caught.value)


def test_a_given_tokenizer_must_be_the_models(tmp_path) -> None:
    own, other = write_vocabulary(tmp_path / "own").parent, write_vocabulary(tmp_path / "other")
    assert find_tokenizer(other, own, CONFIG).ids == find_tokenizer(None, own, CONFIG).ids
    settings = other.parent / "tokenizer_config.json"
    settings.write_text(json.dumps({"do_lower_case": False}))
    with pytest.raises(CheckpointError, match=f"`tokenizer_path` must .*, but {other} encodes texts .* than .*{own};"):
        find_tokenizer(other, own, CONFIG)
    settings.unlink()
    other.write_text(other.read_text().replace("the", "a"))
    with pytest.raises(
        CheckpointError, match=f"`tokenizer_path` must be .*, but {other} has other tokens than .*{own};"
    ):
        find_tokenizer(other, own, CONFIG)
    assert find_tokenizer(other, tmp_path, CONFIG).ids["a"] == len(TOKENS) - 2
    with pytest.raises(
        ValueError, match=f"`tokenizer_path` must be .* suits a gpt, .* but {other}, which suits a bert,"
    ):
        find_tokenizer(other, tmp_path, dataclasses.replace(CONFIG, family="gpt", norm_order="pre"))


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
    card = model_card(metadata(), GPT, "GPT2LMHeadModel", "float32", "me/gpt_mine", True, {"val/loss": 3.21987})
    found = rows(card)
    assert found["layers"] == "3" and found["hidden size"] == "24" and found["vocabulary"] == "1,999"
    assert found["data"] == "local, books.txt" and "/home" not in card
    assert found["steps"] == "2,000 of 3,000" and found["batch"] == "1,024 sequences of 32 tokens"
    assert found["val/loss"] == "3.2199" and found["learning rate"] == "0.00015" and found["seed"] == "7"
    assert 'model = GPT2LMHeadModel.from_pretrained("me/gpt_mine")' in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert "\n# license: choose one" in card


def test_the_losses_of_the_last_step_are_those_of_its_own_validation_or_of_the_record(tmp_path) -> None:
    path, none = tmp_path / "checkpoints" / "step_2000.ckpt", metadata(state={})
    assert losses_of(Checkpoint(path, metadata())) == {"val/loss": 3.21987}
    assert losses_of(Checkpoint(path, none)) == {}
    values = {"val/loss": 3.5, "val/perplexity": 33.1, "val/num_sequences": 64, "train/loss": 3.4}
    record = {"metrics": {name: {"value": value} for name, value in values.items()}, "steps": [0, 2000]}
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert losses_of(Checkpoint(path, none)) == {"val/loss": 3.5, "val/perplexity": 33.1}
    assert losses_of(Checkpoint(path, dataclasses.replace(none, step=1000))) == {}
    (tmp_path / "record.json").write_text("[]")
    assert losses_of(Checkpoint(path, none)) == {}


def test_an_imported_model_s_card_says_where_it_is_from() -> None:
    bert = TransformerConfig("bert", 3, 24, 2, 1999, 32)
    imported = metadata(run={"converted_from": "/models/minilm"}, state={}, step=0)
    card = model_card(imported, bert, "BertForPreTraining", "float16", "published", False, {})
    assert rows(card)["imported from"] == "minilm"
    assert "AutoTokenizer" not in card and "The tokenizer is not in this folder" in card
    assert "pipeline_tag: fill-mask" in card and "## Validation" not in card and "# published\n" in card
