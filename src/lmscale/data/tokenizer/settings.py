"""The settings beside a vocabulary, in the files that transformers writes."""

from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from ...config.family import CorpusForm
from .vocabulary import read_ids, read_object

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

# Keys that change the ids of a text: the argument that honours each, and its value where the key is not set.
ARGUMENTS: dict[str, dict[str, tuple[str, bool | None]]] = {
    "wordpiece": {
        "do_lower_case": ("lowercase", True),
        "strip_accents": ("strip_accents", None),
        "tokenize_chinese_chars": ("handle_chinese_chars", True),
        "clean_text": ("clean_text", True),
    },
    "bpe": {"add_prefix_space": ("add_prefix_space", False)},
}
# What takes the arguments, and the classes of transformers that build it from a vocabulary.
PARTS = {"wordpiece": ("normalizer", normalizers.BertNormalizer), "bpe": ("pre_tokenizer", pre_tokenizers.ByteLevel)}
CLASSES = {
    "wordpiece": ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"),
    "bpe": ("GPT2Tokenizer",),
}
# Further keys that can change the ids, with the values that do not. The other algorithm's keys must be null or false.
_NEUTRAL = {"do_basic_tokenize": (None, True), "never_split": (None, []), "wordpieces_prefix": (None, "##")}
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Keys that cannot: special tokens, which never occur in a text, truncation and padding, decoding, names of files.
_WITHOUT_EFFECT = {
    *_ROLES,
    *"""_commit_hash add_bos_token add_eos_token added_tokens_decoder additional_special_tokens auto_map backend
    cache_dir chat_template clean_up_tokenization_spaces device_map errors extra_special_tokens from_slow
    full_tokenizer_file init_inputs is_local local_files_only mask_padding_with_zero max_len max_length
    model_input_names model_max_length name_or_path pad_to_multiple_of pad_token_id pad_token_type_id padding
    padding_side processor_class return_attention_mask return_token_type_ids special_tokens_map_file
    split_special_tokens stride tokenizer_class tokenizer_file trim_offsets truncation truncation_side
    truncation_strategy use_fast vocab_file vocab_size""".split(),
}


class Settings:
    """The settings of the tokenizer in a folder; none where the files are missing.

    Args:
        form: whose tokenizer it must be.

    Raises:
        ValueError: a file is damaged, or a setting cannot be honoured.
    """

    def __init__(self, folder: Path, form: CorpusForm) -> None:
        self.folder, self.form = folder, form
        self.values = self._read(CONFIG)
        self.lists_added = self.values.get("added_tokens_decoder") is not None
        if not self.lists_added:  # as transformers before 2023 wrote them
            self.values |= self._read(SPECIAL)
        key = "extra_special_tokens" if self.values.get("extra_special_tokens") else "additional_special_tokens"
        extra = self.values.get(key) or []
        if not isinstance(extra, list | dict):
            self._refuse(key, "list tokens", extra)
        named = [*map(self.values.get, _ROLES), *(extra.values() if isinstance(extra, dict) else extra)]
        self.specials = [token for token in map(_content, named) if token is not None]
        self.added = self._added_tokens()
        for role, token in form.token_roles.items():
            if _content(self.values.get(role)) not in (None, token):
                self._refuse(role, f"be {token}", self.values[role])
        others = {key for algorithm, keys in ARGUMENTS.items() if algorithm != form.algorithm for key in keys}
        for key in self.values.keys() & (others | set(_NEUTRAL)):
            if self.values[key] not in (allowed := _NEUTRAL.get(key, (None, False))):
                self._refuse(key, f"be {allowed[-1]}", self.values[key])
        for key, (_, default) in ARGUMENTS[form.algorithm].items():
            if type(value := self.values.get(key, default)) is not bool and value is not default:
                self._refuse(key, "be true or false", value)

    def arguments(self) -> dict[str, bool | None]:
        """The arguments of BERT's normalizer or of GPT-2's pre-tokenizer, for a vocabulary without a tokenizer.json.

        Raises:
            ValueError: a different class builds the tokenizer, or a key is not known here.
        """
        if not self._has_known_class():
            classes = ", ".join(CLASSES[self.form.algorithm])
            self._refuse("tokenizer_class", f"be {classes} without a tokenizer.json", self.values["tokenizer_class"])
        honoured = ARGUMENTS[self.form.algorithm]
        others = sorted(self.values.keys() - honoured.keys() - _NEUTRAL.keys() - _WITHOUT_EFFECT)
        if unknown := [f"`{key}` ({self.values[key]!r})" for key in others if self.values[key]]:
            listed = ", ".join(unknown)
            raise ValueError(f"{self.folder / CONFIG} has keys not known here: {listed}; delete those without effect")
        return {argument: self.values.get(key, default) for key, (argument, default) in honoured.items()}

    def add_tokens(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Add the listed tokens, in the order of their ids, and then the special ones, which may have no id yet.

        Raises:
            ValueError: a token does not get its id.
        """
        for index, token in sorted(self.added.items()):
            tokenizer.add_tokens([token])
            found = tokenizer.token_to_id(token.content)
            if found != index:
                self._refuse("added_tokens_decoder", f"give {token.content!r} the next free id, {found}", index)
        tokenizer.add_special_tokens(self.specials)

    def check_agreement(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Check that a tokenizer.json says the same as the settings beside it.

        Where a class of transformers builds the tokenizer, a key that is not set stands for its default there.

        Raises:
            ValueError: they contradict each other.
        """
        if not (self.folder / CONFIG).is_file():
            return
        name, kind = PARTS[self.form.algorithm]
        part, known = getattr(tokenizer, name), self._has_known_class()
        if known and not isinstance(part, kind):
            expected = f"be PreTrainedTokenizerFast, because the {name} of tokenizer.json is not {kind.__name__}"
            self._refuse("tokenizer_class", expected, self.values.get("tokenizer_class"))
        for key, (argument, default) in ARGUMENTS[self.form.algorithm].items():
            if isinstance(part, kind) and (known or key in self.values):
                stated, found = self.values.get(key, default), getattr(part, argument)
                if stated != found:
                    self._refuse(key, f"be {found}, as in tokenizer.json", self.values.get(key, "not set"))
        stated, found = _plain(self.added), _plain(tokenizer.get_added_tokens_decoder())
        if stated != found if self.lists_added else not stated.items() <= found.items():
            self._refuse("added_tokens_decoder", f"list {found}, as in tokenizer.json", stated)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_object(path) if path.is_file() else {}

    def _added_tokens(self) -> dict[int, AddedToken]:
        """The added tokens by id; those of a file of their own are special if they have a role."""
        if not self.lists_added:
            path = self.folder / ADDED
            return {
                index: AddedToken(token, normalized=token not in self.specials, special=token in self.specials)
                for token, index in (read_ids(path) if path.is_file() else {}).items()
            }
        listed = self.values["added_tokens_decoder"]
        try:
            return {int(index): AddedToken(**token) for index, token in listed.items() if token["content"]}
        except (AttributeError, KeyError, TypeError, ValueError):
            self._refuse("added_tokens_decoder", "give a token for each id", listed)

    def _has_known_class(self) -> bool:
        name = self.values.get("tokenizer_class")
        return name is None or str(name).removesuffix("Fast") in CLASSES[self.form.algorithm]

    def _refuse(self, key: str, rule: str, value: Any) -> NoReturn:
        raise ValueError(f"`{key}` of {self.folder / CONFIG} must {rule}, but is {value!r}")


def _content(token: Any) -> str | None:
    """The text of a token, which may be given with its properties."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _plain(tokens: dict[int, AddedToken]) -> dict[int, str]:
    """The tokens that a text is searched for: special ones are not."""
    return {index: token.content for index, token in tokens.items() if not token.special}
