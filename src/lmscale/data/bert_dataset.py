"""BERT's samples: sentence pairs, some in swapped order, with whole-word n-grams masked."""

import hashlib
from pathlib import Path

import numpy as np

from ..config.data import DataConfig
from .bert_index import TargetLengths, write_pairs
from .gathering import read_stretches
from .index_cache import cached_index
from .indexed_dataset import IndexedDataset
from .permutation import Permutation
from .prepared import CorpusPart, PreparedCorpus
from .sampler import in_epochs

IGNORE_LABEL = -100
NUM_SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]


class BERTDataset:
    """Sentence pairs with masked words; every random choice is a pure function of (seed, epoch, sample index).

    Which sentences make a sample is drawn once from the seed, so that every epoch has the same number of samples; where
    A ends, the order, the truncation and the masks are drawn anew in each epoch.

    Args:
        prepared: a corpus prepared for `bert`.
        part: the documents of it that are meant.
        config: seq_length and the probabilities.
        seed: of the run.
        name: of the part, for messages.
        number: of the dataset in a blend: each draws numbers of its own.

    Raises:
        ValueError: no document has two sentences, or `seq_length` leaves no room for two tokens.

    Source: sections 4.2 and 5.3; procedure of Megatron-LM v1.0 (`data/bert_dataset.py`, `data/dataset_utils.py`),
    without its reuse of one random number for the short length, and with a swap drawn before truncation as there.
    """

    def __init__(
        self, prepared: PreparedCorpus, part: CorpusPart, config: DataConfig, seed: int, name: str, number: int = 0
    ) -> None:
        if config.seq_length < NUM_SPECIAL_TOKENS + 2:
            raise ValueError(
                f"`data.seq_length` must be at least {NUM_SPECIAL_TOKENS + 2} for BERT, but is {config.seq_length}"
            )
        self.dataset = IndexedDataset(part.prefix)
        self.config, self.seed, self.identity, self.number = config, seed, part.identity, number
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
            raise ValueError(f"the {name} part must have a document of at least 2 sentences, but has none")
        self._shuffles: dict[int, Permutation] = {}

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self.pairs.rows)

    def order(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and indices of this dataset's samples number `places` in a blend, both int64 as shaped."""
        return in_epochs(places, len(self), self._shuffle_of)

    def _shuffle_of(self, epoch: int) -> Permutation:
        if epoch not in self._shuffles:
            name = f"order/{self.identity}/{self.seed}/{epoch}"
            self._shuffles = {epoch: Permutation(len(self), name)}  # of the epochs before none is needed again
        return self._shuffles[epoch]

    def batch(self, epochs: np.ndarray, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Training samples.

        Shapes:
            epochs, indices int64 [b]; tokens, token_types, labels int64 [b, s] (labels -100 where not masked);
            attention_mask bool [b, s], True for real tokens; sop_labels int64 [b], 1 where the sentences are swapped.

        Raises:
            ValueError: an id that is not of the vocabulary.
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
        borders = self.dataset.sequence_starts(rows[:, :2])
        text = read_stretches(self.dataset, borders[:, 0], borders[:, 1] - borders[:, 0], self.vocab_size)
        end = 0
        for place, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
            start, end = end, end + int(borders[place, 1] - borders[place, 0])
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
        """Tokens with masks and labels, both int64 [at most s], the length of A, and whether the sentences are swapped.

        Args:
            row: first sentence, sentence after the last, target length.
            text: the ids of the sentences.
        """
        # 2^40 samples an epoch and 2^24 epochs have keys of their own.
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
        # At least one token where any is to be masked; Megatron-LM scores none in targets below 7.
        limit = max(min(share * target, round(share * len(tokens))), 1 if share > 0 else 0)
        ordinary = np.ones(len(tokens), dtype=bool)
        ordinary[[0, length_a + 1, len(tokens) - 1]] = False
        positions = np.flatnonzero(ordinary)
        labels = np.full(len(tokens), IGNORE_LABEL, dtype=np.int64)
        if len(positions) == 0:
            return labels  # nothing but empty sentences
        # A continuation piece joins the word before it, also across [SEP] where truncation left one in front.
        starts = ~self.is_continuation[tokens[positions]]
        starts[0] = True
        borders = np.append(np.flatnonzero(starts), len(positions))
        covered = choose_spans(borders, limit, self.config.max_ngram, generator)
        chosen = positions[covered]
        labels[chosen] = tokens[chosen]
        fate = generator.random(len(chosen))
        tokens[chosen[fate < 0.8]] = self.special["[MASK]"]
        replaced = chosen[fate >= 0.9]
        tokens[replaced] = generator.integers(0, self.vocab_size, len(replaced))
        return labels


def make_samples(
    prepared: PreparedCorpus,
    split: str,
    part: CorpusPart,
    config: DataConfig,
    seed: int,
    number: int = 0,
    num_samples: int | None = None,
) -> BERTDataset:
    """The samples of one dataset; an epoch has the same number whatever a run takes."""
    return BERTDataset(prepared, part, config, seed, split, number)


def truncate_pair(
    a: np.ndarray, b: np.ndarray, target: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Shorten two token lists to `target` together, a token at a time from the longer (a tie: b), front or back evenly.

    Shapes:
        a, b int64 [any]; returns their middle parts.
    """
    surplus = len(a) + len(b) - target
    if surplus <= 0:
        return a, b
    # One token at a time from the longer side leaves these lengths; the ends are then fair coins.
    difference = len(a) - len(b)
    from_a = min(max(difference, 0), surplus)
    from_b = min(max(-difference, 0), surplus)
    rest = surplus - from_a - from_b
    from_a, from_b = from_a + rest // 2, from_b + rest - rest // 2
    front_a, front_b = generator.binomial(from_a, 0.5), generator.binomial(from_b, 0.5)
    return a[front_a : len(a) - (from_a - front_a)], b[front_b : len(b) - (from_b - front_b)]


def choose_spans(borders: np.ndarray, limit: float, max_ngram: int, generator: np.random.Generator) -> np.ndarray:
    """Whole-word n-grams to mask, up to `limit` tokens.

    Words are visited in random order as starts of an n-gram, n in 1..max_ngram with probability proportional to 1/n
    (fewer near the end); one that would pass the limit is shortened, one that meets a masked word is left.

    Shapes:
        borders int64 [words + 1], where words start in the list of ordinary tokens, and its length; returns bool
        [ordinary tokens], True where masked.
    """
    num_words = len(borders) - 1
    edges = borders.tolist()
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
