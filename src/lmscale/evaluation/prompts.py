"""Prompts of a text generation: read, tokenize and check them before the model is loaded.

A row is one sample of one prompt.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ..config import TransformerConfig
from ..data.tokenizer import END_OF_TEXT, Tokenizer
from ..text.documents import SURROGATE
from ..text.input_files import format_of
from ..text.whole_file import read_text_file, text_of_json


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Args:
        name: for messages: `prompt`, or file and line.
        ids: the text's tokens, or for an empty text the end-of-text token, after which a document begins.
        num_new: maximum number of tokens to add.
        first_sample: number of its first sample among those of equal ids.
    """

    text: str
    name: str
    ids: tuple[int, ...]
    num_new: int
    first_sample: int


@dataclass
class Row:
    """One sample of a prompt: its number, the ids added so far, and why it ended (None while it grows)."""

    prompt: Prompt
    sample: int
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None


def read_prompts(path: str | Path) -> list[tuple[str, str]]:
    """Read the (name, text) of each prompt of a file: each line, or for .jsonl the field `prompt` of each line.

    An empty line is an empty prompt.

    Raises:
        ValueError: the file cannot be read as text (see `read_text_file`), or a line of JSONL has no text `prompt`.
    """
    file = read_text_file(path, "file")
    is_json = format_of(file.name) == "json"
    rule = '`file` must have {"prompt": text}'
    return [(name, text_of_json(line, "prompt", rule, name) if is_json else line) for name, line in file.lines]


@dataclass
class PromptReader:
    """Convert texts to prompts and check that they fit the model.

    Args:
        max_new_tokens: None allows as many as the positions permit.
        num_samples: per prompt; numbering continues if the same ids occur again, so all samples of a session have
            different keys.
    """

    tokenizer: Tokenizer
    config: TransformerConfig
    max_new_tokens: int | None
    num_samples: int = 1
    _samples: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def read(self, text: str, name: str) -> Prompt:
        """Convert a text to a prompt.

        Raises:
            ValueError: the text is not valid Unicode, it is empty and the tokenizer has no end-of-text token, an id is
                outside the model's vocabulary, or prompt and new tokens exceed the model's positions.
        """
        if bad := SURROGATE.search(text):
            raise ValueError(f"{name}: a prompt must be valid Unicode, but has {bad[0]!r} at {bad.start()}")
        ids = tuple(self.tokenizer.encode_batch([text])[0]) or (self.tokenizer.id_of(END_OF_TEXT),)
        if max(ids) >= self.config.vocab_size:
            raise ValueError(
                f"{name}: the tokenizer's ids must be below the model's `vocab_size` ({self.config.vocab_size}), "
                f"but one is {max(ids)}"
            )
        num_free = self.config.max_position_embeddings - len(ids)
        num_new = num_free if self.max_new_tokens is None else self.max_new_tokens
        if num_free < 1:
            raise ValueError(
                f"{name}: a prompt must be shorter than the model's positions "
                f"({self.config.max_position_embeddings}), but is {len(ids)} tokens"
            )
        if num_new > num_free:
            raise ValueError(
                f"{name}: `max_new_tokens` must be at most {num_free} (the model's positions, "
                f"{self.config.max_position_embeddings}, less the prompt's {len(ids)} tokens), but is {num_new}"
            )
        first = self._samples[ids]
        self._samples[ids] += self.num_samples
        return Prompt(text, name, ids, num_new, first)

    def rows(self, prompt: Prompt) -> list[Row]:
        """Return one row per sample of a prompt."""
        return [Row(prompt, prompt.first_sample + i) for i in range(self.num_samples)]
