"""Generate text with a GPT: extend a batch of rows token by token, and display them as they grow.

A row's text depends only on the weights, its prompt, its key and the sampling parameters, not on the other rows of the
batch (up to the rounding of differently shaped matrix products).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

import torch
from torch import Tensor

from ..config.generate import Sampling
from ..data.tokenizer import Tokenizer
from ..models import GPT
from ..models.key_value_cache import KeyValueCache
from .prompts import Row
from .sampling import choose_tokens, sample_key

ENDED, FULL = "end_of_text", "length"  # why a row ends


@dataclass(frozen=True)
class Generator:
    """Extend rows with this rank's shard of a GPT.

    Args:
        model: in evaluation mode.
        end_id: id of the end-of-text token, which ends a row and is not part of it; None if no token ends a row.
        seed: seed of all random numbers.
    """

    model: GPT
    sampling: Sampling
    end_id: int | None
    seed: int

    @torch.inference_mode()
    def extend(self, rows: Sequence[Row], on_token: Callable[[], None] = lambda: None) -> None:
        """Add tokens to all rows until each has ended; a finished row leaves the batch.

        Each distinct prompt is processed once, regardless of its number of samples.

        Args:
            on_token: called whenever every row has been extended by one token.

        Communicates:
            over the tensor group, per new token, the model's forward pass and `choose_tokens`.
        """
        device = self.model.transformer.position_embedding.device
        prompts = list(dict.fromkeys(row.prompt.ids for row in rows))
        cache, logits = self._read(prompts, max(len(row.prompt.ids) + row.prompt.num_new - 1 for row in rows))
        origin = torch.tensor([prompts.index(row.prompt.ids) for row in rows], device=device)
        cache.select(origin)
        logits = logits[origin]
        keys = [sample_key(self.seed, row.prompt.ids, row.sample) for row in rows]
        keys = torch.tensor(keys, dtype=torch.int64, device=device)
        active = list(rows)
        while True:
            tokens = choose_tokens(logits, self.sampling, keys, cache.lengths, self.model.context)
            for row, token in zip(active, tokens.tolist(), strict=True):
                if token == self.end_id:
                    row.finish = ENDED
                    continue
                row.tokens.append(token)
                if len(row.tokens) == row.prompt.num_new:
                    row.finish = FULL
            on_token()
            unfinished = [i for i, row in enumerate(active) if row.finish is None]
            if not unfinished:
                return
            if len(unfinished) < len(active):
                kept = torch.tensor(unfinished, device=device)
                cache.select(kept)
                keys, tokens, active = keys[kept], tokens[kept], [active[i] for i in unfinished]
            logits = self.model.next_token_logits(tokens[:, None], torch.ones_like(tokens), cache)

    def _read(self, prompts: list[tuple[int, ...]], capacity: int) -> tuple[KeyValueCache, Tensor]:
        """Process the prompts; returns the key-value cache and the logits of the next tokens."""
        weight = self.model.transformer.position_embedding
        cache = KeyValueCache(
            self.model.config, self.model.context, len(prompts), capacity, weight.dtype, weight.device
        )
        counts = torch.tensor([len(ids) for ids in prompts])
        tokens = torch.zeros(len(prompts), int(counts.max()), dtype=torch.int64)
        for row, ids in zip(tokens, prompts, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        logits = self.model.next_token_logits(tokens.to(weight.device), counts.to(weight.device), cache)
        return cache, logits


def in_batches(rows: Sequence[Row], micro_batch_size: int) -> Iterator[Sequence[Row]]:
    """Yield rows in order, at most `micro_batch_size` at a time."""
    for first in range(0, len(rows), micro_batch_size):
        yield rows[first : first + micro_batch_size]


class Display:
    """Write rows to a terminal in order; the first unfinished row is shown as it grows, later rows wait.

    Only complete characters are written: tokens of byte-level BPE may end inside a character, which decodes to U+FFFD.

    Args:
        heading: whether a line with its name precedes each row.
        with_prompt: whether the prompt precedes the new text.
    """

    def __init__(
        self, rows: Sequence[Row], tokenizer: Tokenizer, out: TextIO, heading: bool, with_prompt: bool
    ) -> None:
        self._rows, self._tokenizer, self._out = list(rows), tokenizer, out
        self._heading, self._with_prompt = heading, with_prompt
        self._written: int | None = None  # characters written of the current row; None before its heading

    def update(self) -> None:
        """Write all text that is available."""
        while self._rows:
            row = self._rows[0]
            if self._written is None:
                if self._heading:
                    self._out.write(f"--- {row.prompt.name}, sample {row.sample}\n")
                self._out.write(row.prompt.text if self._with_prompt else "")
                self._written = 0
            text = self._tokenizer.decode(row.tokens)
            if row.finish is None:
                text = text.rstrip("\N{REPLACEMENT CHARACTER}")
            self._out.write(text[self._written :])
            self._written = len(text)
            if row.finish is None:
                break
            self._out.write("\n")
            self._rows.pop(0)
            self._written = None
        self._out.flush()


def as_json(row: Row, tokenizer: Tokenizer) -> str:
    """Format a row as one line of JSON."""
    values = {"prompt": row.prompt.text, "sample": row.sample, "text": tokenizer.decode(row.tokens)}
    return json.dumps(values | {"tokens": row.tokens, "finish": row.finish}, ensure_ascii=False)
