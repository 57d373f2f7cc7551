"""Text from a GPT: the loop that lengthens a batch of rows, and their texts as they come.

What a row becomes depends on the weights, its prompt, its key and the sampling alone,
not on the rows beside it (up to the rounding of differently shaped matrix products).
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
    """Lengthens rows with one GPT, this rank's shard of it.

    Args:
        model: in evaluation mode.
        end_id: id of the end-of-text token, which ends a row and is not part of it; None: no token does.
        seed: of all random numbers.
    """

    model: GPT
    sampling: Sampling
    end_id: int | None
    seed: int

    @torch.inference_mode()
    def lengthen(self, rows: Sequence[Row], hear: Callable[[], None] = lambda: None) -> None:
        """Add tokens to all rows at once, until each has ended; a row that has leaves the batch.

        Each different prompt is read once, however many samples it has.

        Args:
            hear: called whenever every row has been lengthened.

        Communicates:
            for each new token, over the tensor group, the model's forward pass and `choose_tokens`.
        """
        device = self.model.transformer.position_embedding.device
        prompts = list({row.prompt.ids: row.prompt for row in rows})
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
                self._add(row, token)
            hear()
            going = [i for i, row in enumerate(active) if row.finish is None]
            if not going:
                return
            if len(going) < len(active):
                kept = torch.tensor(going, device=device)
                cache.select(kept)
                keys, tokens, active = keys[kept], tokens[kept], [active[i] for i in going]
            logits = self.model.next_token_logits(tokens[:, None], torch.ones_like(tokens), cache)

    def _read(self, prompts: list[tuple[int, ...]], capacity: int) -> tuple[KeyValueCache, Tensor]:
        """A cache that holds the prompts, and the logits of what follows each."""
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

    def _add(self, row: Row, token: int) -> None:
        if token == self.end_id:
            row.finish = ENDED
            return
        row.tokens.append(token)
        if len(row.tokens) == row.prompt.num_new:
            row.finish = FULL


def in_batches(rows: Sequence[Row], micro_batch_size: int) -> Iterator[Sequence[Row]]:
    """Rows in order, at most `micro_batch_size` at a time."""
    for first in range(0, len(rows), micro_batch_size):
        yield rows[first : first + micro_batch_size]


class Display:
    """Writes rows to a terminal, one after the other and each as far as it goes: the first that has not ended grows
    while those behind it wait.

    A character is written when it is whole: the tokens of byte-level BPE may end inside one, which decodes to U+FFFD.

    Args:
        heading: whether each row has a line above it that names it.
        with_prompt: whether its prompt stands in front of what is new.
    """

    def __init__(
        self, rows: Sequence[Row], tokenizer: Tokenizer, out: TextIO, heading: bool, with_prompt: bool
    ) -> None:
        self._rows, self._tokenizer, self._out = list(rows), tokenizer, out
        self._heading, self._with_prompt = heading, with_prompt
        self._written: int | None = None  # characters of the row being written; None: nothing of it, no heading either

    def update(self) -> None:
        """Write what can be."""
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
            self._written = max(self._written, len(text))
            if row.finish is None:
                break
            self._out.write("\n")
            self._rows.pop(0)
            self._written = None
        self._out.flush()


def as_json(row: Row, tokenizer: Tokenizer) -> str:
    """A row of the results, one line of JSON."""
    values = {"prompt": row.prompt.text, "sample": row.sample, "text": tokenizer.decode(row.tokens)}
    return json.dumps(values | {"tokens": row.tokens, "finish": row.finish}, ensure_ascii=False)
