"""BERT's samples: sentence pairs, half of them swapped, with masked whole-word n-grams."""

import hashlib
from pathlib import Path

import numpy as np

from ..config.checks import refuse
from ..config.data import DataConfig
from .bert_index import TargetLengths, write_pairs
from .index_cache import cached_index
from .indexed_dataset import CorpusPart, IndexedDataset
from .prepare import PreparedCorpus
from .sampler import EpochShuffle

IGNORE_LABEL = -100
NUM_SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]


class BERTDataset:
    """Sentence pairs with masked words; every random choice is a pure function of (seed, epoch, sample index).

    The sentences of a sample are drawn once from the seed, so every epoch has the same number of samples. The end of A,
    the order, the truncation and the masks are drawn again in every epoch.

    Args:
        prepared: a corpus prepared for `bert`.
        split: `train` or `validation`, for messages.
        part: the documents to use.
        config: seq_length and the probabilities.
        seed: of the run.
        number: index of the dataset in a blend; each dataset has its own random numbers.
        num_samples: not used: an epoch has the same samples whatever a run takes.

    Raises:
        ValueError: no document has two sentences, or `seq_length` is too short for two tokens.

    Source: sections 4.2 and 5.3; procedure of Megatron-LM v1.0 (`data/bert_dataset.py`, `data/dataset_utils.py`),
    including the swap before truncation, but without its reuse of one random number for the short length.
    """

    def __init__(
        self,
        prepared: PreparedCorpus,
        split: str,
        part: CorpusPart,
        config: DataConfig,
        seed: int,
        number: int = 0,
        num_samples: int | None = None,
    ) -> None:
        if config.seq_length < NUM_SPECIAL_TOKENS + 2:
            refuse("data.seq_length", f"at least {NUM_SPECIAL_TOKENS + 2} for BERT", config.seq_length)
        self.dataset = IndexedDataset(part.prefix)
        self.config, self.number = config, number
        self.vocab_size = prepared.vocab_size
        self.special = prepared.special_ids
        self.is_continuation = prepared.load_tokenizer().is_continuation
        self.seed_key = int.from_bytes(hashlib.blake2b(f"bert/{seed}".encode(), digest_size=8).digest(), "little")
        lengths = TargetLengths(self.seed_key, config.seq_length - NUM_SPECIAL_TOKENS, config.short_seq_probability)
        self.pairs = cached_index(
            Path(prepared.index_folder),
            "bert",
            (part.identity, part.first, part.last, lengths),
            lambda file: write_pairs(file, self.dataset, part.first, part.last, lengths),
        )
        if len(self.pairs.rows) == 0:
            held_out = ", and a smaller `validation_every` holds out more" if split == "validation" else ""
            raise ValueError(
                f"the {split} part must have a document of at least 2 sentences, but has none; a document of a text "
                f"file ends at a blank line{held_out}"
            )
        self.order = EpochShuffle(len(self), f"order/{part.identity}/{seed}")  # in a blend

    def __len__(self) -> int:
        """Number of samples per epoch."""
        return len(self.pairs.rows)

    def batch(self, epochs: np.ndarray, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return training samples.

        Shapes:
            epochs, indices int64 [b]; tokens, token_types, labels int64 [b, s] (labels -100 where not masked);
            attention_mask bool [b, s], True for real tokens; sop_labels int64 [b], 1 where the sentences are swapped.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        size, length = len(indices), self.config.seq_length
        found = {
            "tokens": np.full((size, length), self.special["[PAD]"]),
            "token_types": np.zeros((size, length), dtype=np.int64),
            "attention_mask": np.zeros((size, length), dtype=bool),
            "labels": np.full((size, length), IGNORE_LABEL),
            "sop_labels": np.empty(size, dtype=np.int64),
        }
        rows = self.pairs.rows[indices].astype(np.int64)
        bounds = self.dataset.sequence_starts(rows[:, :2])
        text = self.dataset.read_ranges(bounds[:, 0], bounds[:, 1] - bounds[:, 0], self.vocab_size)
        end = 0
        for place, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
            start, end = end, end + int(bounds[place, 1] - bounds[place, 0])
            tokens, labels, length_a, swapped = self._sample(epoch, index, rows[place].tolist(), text[start:end])
            count = len(tokens)
            found["tokens"][place, :count] = tokens
            found["token_types"][place, length_a + 2 : count] = 1
            found["attention_mask"][place, :count] = True
            found["labels"][place, :count] = labels
            found["sop_labels"][place] = swapped
        return found

    def _sample(
        self, epoch: int, index: int, row: list[int], text: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """Return masked tokens and labels, both int64 [at most s], the length of A, and whether A and B are swapped.

        Args:
            row: first sentence, sentence after the last, target length.
            text: the ids of the sentences.
        """
        # Keys are distinct for up to 2^40 samples per epoch and 2^24 epochs.
        counter = [0, self.number, index, epoch + 1]
        generator = np.random.Generator(np.random.Philox(key=self.seed_key, counter=counter))
        first, end, target = row
        split = first + int(generator.integers(1, end - first))
        middle = int(self.dataset.sizes[first:split].sum())
        a, b = text[:middle], text[middle:]
        swapped = bool(generator.random() < 0.5)
        if swapped:
            a, b = b, a
        a, b = truncate_pair(a, b, target, generator)
        cls, sep = self.special["[CLS]"], self.special["[SEP]"]
        tokens = np.concatenate([[cls], a, [sep], b, [sep]])
        return tokens, self._mask(tokens, len(a), target, generator), len(a), swapped

    def _mask(self, tokens: np.ndarray, length_a: int, target: int, generator: np.random.Generator) -> np.ndarray:
        """Mask `tokens` in place and return the labels; [CLS] and the [SEP]s are never masked."""
        share = self.config.mask_probability
        # Mask at least one token; Megatron-LM masks none in targets below 7 tokens.
        limit = max(min(share * target, round(share * len(tokens))), 1)
        ordinary = np.ones(len(tokens), dtype=bool)
        ordinary[[0, length_a + 1, len(tokens) - 1]] = False
        positions = np.flatnonzero(ordinary)
        labels = np.full(len(tokens), IGNORE_LABEL, dtype=np.int64)
        if len(positions) == 0:
            return labels  # all sentences are empty
        # A continuation piece belongs to the previous word, even across [SEP] if truncation left it at the front.
        starts = ~self.is_continuation[tokens[positions]]
        starts[0] = True
        word_starts = np.append(np.flatnonzero(starts), len(positions))
        covered = choose_spans(word_starts, limit, self.config.max_ngram, generator)
        chosen = positions[covered]
        labels[chosen] = tokens[chosen]
        draws = generator.random(len(chosen))
        tokens[chosen[draws < 0.8]] = self.special["[MASK]"]
        replaced = chosen[draws >= 0.9]
        tokens[replaced] = generator.integers(0, self.vocab_size, len(replaced))
        return labels


make_samples = BERTDataset  # the name by which families give their samples


def truncate_pair(
    a: np.ndarray, b: np.ndarray, target: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Shorten two token lists to `target` tokens in total.

    Tokens are removed one at a time from the longer list (b if they are equal), from front or back with probability
    1/2.

    Shapes:
        a, b int64 [any]; returns the remaining middle parts.
    """
    surplus = len(a) + len(b) - target
    if surplus <= 0:
        return a, b
    # Removing one token at a time from the longer list gives these lengths; each removed end is a fair coin flip.
    difference = len(a) - len(b)
    from_a = min(max(difference, 0), surplus)
    from_b = min(max(-difference, 0), surplus)
    rest = surplus - from_a - from_b
    from_a, from_b = from_a + rest // 2, from_b + rest - rest // 2
    front_a, front_b = generator.binomial(from_a, 0.5), generator.binomial(from_b, 0.5)
    return a[front_a : len(a) - (from_a - front_a)], b[front_b : len(b) - (from_b - front_b)]


def choose_spans(word_starts: np.ndarray, limit: float, max_ngram: int, generator: np.random.Generator) -> np.ndarray:
    """Choose whole-word n-grams to mask, up to `limit` tokens.

    Words are visited in random order as starts of an n-gram, with n in 1..max_ngram and probability proportional to 1/n
    (n is bounded near the end). An n-gram that exceeds the limit is shortened; one that overlaps a masked word is
    skipped.

    Shapes:
        word_starts int64 [words + 1], index of each word's first token among the ordinary tokens, and their number;
        returns bool [ordinary tokens], True where masked.
    """
    num_words = len(word_starts) - 1
    edges = word_starts.tolist()
    weights = np.cumsum(1.0 / np.arange(1, max_ngram + 1))
    order = generator.permutation(num_words).tolist()
    draws = generator.random(num_words).tolist()
    cumulative = weights.tolist()
    word_covered = [False] * num_words
    covered = np.zeros(edges[-1], dtype=bool)
    count = 0
    for start, draw in zip(order, draws, strict=True):
        if count >= limit:
            break
        available = min(max_ngram, num_words - start)
        threshold = draw * cumulative[available - 1]
        n = 1
        while cumulative[n - 1] <= threshold:
            n += 1
        while n > 0 and count + edges[start + n] - edges[start] > limit:
            n -= 1
        if n == 0 or any(word_covered[start : start + n]):
            continue
        word_covered[start : start + n] = [True] * n
        covered[edges[start] : edges[start + n]] = True
        count += edges[start + n] - edges[start]
    return covered
