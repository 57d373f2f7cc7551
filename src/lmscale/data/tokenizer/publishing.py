"""Complete a tokenizer's files, so that `transformers.AutoTokenizer` feeds a model as it was trained here."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from ...config.family import CorpusForm
from .encoding import write_tokenizer
from .published import UNKNOWN, WHOLE, byte_level, frame_inputs, wordpiece
from .settings import ARGUMENTS, CLASSES, CONFIG, PARTS
from .vocabulary import read_object, read_whole

_BERT_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
_BLANK = {
    "wordpiece": lambda arguments: wordpiece(models.WordPiece(unk_token=UNKNOWN), **arguments),
    "bpe": lambda arguments: byte_level(models.BPE(), **arguments),
}


def complete_files(folder: Path, form: CorpusForm, max_length: int) -> None:
    """Complete the files in a folder: the frame of a BERT's inputs, the class, the special tokens and the length.

    Files that say all of it are not changed.

    Args:
        form: whose tokenizer it is.
        max_length: tokens to which a text is truncated at most.

    Raises:
        ValueError: a file is damaged.
        OSError: a file cannot be written.
    """
    whole, config, tokenizer = folder / WHOLE, folder / CONFIG, None
    if whole.is_file():
        tokenizer = read_whole(whole)
        if form.algorithm == "wordpiece" and not _is_framed(tokenizer):
            frame_inputs(tokenizer)
            write_tokenizer(tokenizer, whole)
    found = read_object(config) if config.is_file() else None
    values = _settings(tokenizer, form) if found is None else dict(found)
    is_berts = str(values.get("tokenizer_class")).removesuffix("Fast") == "BertTokenizer"
    if form.algorithm == "wordpiece" and not is_berts:
        values["model_input_names"] = _BERT_INPUTS
    limit = values.get("model_max_length")
    if not isinstance(limit, int | float) or limit > max_length:
        values["model_max_length"] = max_length
    if values != found:
        config.write_text(json.dumps(values, indent=1), encoding="utf-8")


def _is_framed(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the library builds [CLS] A [SEP] and [CLS] A [SEP] B [SEP], with token types 0 and 1."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    one, two = tokenizer.encode(""), tokenizer.encode("", "")
    found = one.ids, one.type_ids, two.ids, two.type_ids
    return found == ([cls, sep], [0, 0], [cls, sep, sep], [0, 0, 1])


def _settings(tokenizer: tokenizers.Tokenizer | None, form: CorpusForm) -> dict[str, Any]:
    """The `tokenizer_config.json` for files without one: the class of the family where it builds the same tokenizer."""
    name = CLASSES[form.algorithm][0]
    if tokenizer is None:  # a vocabulary alone, which is read by the defaults of the class
        return {"tokenizer_class": name}
    roles = {role: token for role, token in form.token_roles.items() if tokenizer.token_to_id(token) is not None}
    attribute, kind = PARTS[form.algorithm]
    part = getattr(tokenizer, attribute)
    if isinstance(part, kind) and roles == form.token_roles:  # the class would add a role's token that is missing
        taken = {key: argument for key, (argument, _) in ARGUMENTS[form.algorithm].items() if key != "clean_text"}
        blank = _BLANK[form.algorithm]({argument: getattr(part, argument) for argument in taken.values()})
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        if added <= set(roles.values()) and _comparable(tokenizer) == _comparable(blank):
            arguments = {key: getattr(part, argument) for key, argument in taken.items()}
            return {"tokenizer_class": name, **arguments, **roles}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **roles}


def _comparable(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """What a class of transformers sets, whatever the vocabulary."""
    spec = json.loads(tokenizer.to_str())
    model = {key: value or None for key, value in spec["model"].items() if key not in ("vocab", "merges")}
    return {"model": model} | {key: spec[key] for key in ("normalizer", "pre_tokenizer", "decoder")}
