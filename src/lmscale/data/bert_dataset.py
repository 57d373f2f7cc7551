"""BERT's samples: sentence pairs, some in swapped order, with whole-word n-grams masked."""

import hashlib

import numpy as np

from ..data_config import DataConfig
from .prepare import PreparedCorpus

IGNORE_LABEL = -100
NUM_SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]


class BERTDataset:
    """Sentence pairs with masked words; every random choice is a pure function of (seed, epoch, sample index).

    Which sentences make a sample is drawn once from the seed, so that every epoch has the same number of samples; where
    A ends, the order, the truncation and the masks are drawn anew in each epoch.

    Args:
        prepared: a corpus prepared for `bert`.
        split: `train` or `validation`.
        config: seq_length and the probabilities.
        seed: of the run.

    Raises:
        ValueError: no document has two sentences, or `seq_length` leaves no room for two tokens.

    Source: sections 4.2 and 5.3; procedure of Megatron-LM v1.0 (`data/bert_dataset.py`, `data/dataset_utils.py`),
    without its reuse of one random number for the short length, and with a swap drawn before truncation as there.
    """

    def __init__(self, prepared: PreparedCorpus, split: str, config: DataConfig, seed: int) -> None:
        if config.seq_length < NUM_SPECIAL_TOKENS + 2:
            raise ValueError(
                f"`data.seq_length` must be at least {NUM_SPECIAL_TOKENS + 2} for BERT, but is {config.seq_length}"
            )
        self.tokens = prepared.array(split, "tokens")
        self.sentences = np.asarray(prepared.array(split, "sentences"))
        self.config = config
        self.vocab_size = prepared.vocab_size
        self.special = prepared.special_ids
        self.is_continuation = prepared.load_tokenizer().is_continuation
        self.seed_key = int.from_bytes(hashlib.blake2b(f"bert/{seed}".encode(), digest_size=8).digest(), "little")
        self.pairs = self._map_samples(np.asarray(prepared.array(split, "documents")))
        if len(self.pairs) == 0:
            raise ValueError(f"the {split} part must have a document of at least 2 sentences, but has none")

    def __len__(self) -> int:
        return len(self.pairs)

    def _map_samples(self, documents: np.ndarray) -> np.ndarray:
        """Rows (first sentence, sentence after the last, target length), int64 [samples, 3].

        A sample takes sentences of one document until the target length is reached; the document's last two or more
        make one of whatever length. Documents of one sentence have no pair and are left out.
        """
        generator = np.random.Generator(np.random.Philox(key=self.seed_key))
        longest = self.config.seq_length - NUM_SPECIAL_TOKENS
        lengths = np.diff(self.sentences)
        rows = []
        for first, end in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
            if end - first < 2:
                continue
            start, held, target = first, 0, self._target_length(generator, longest)
            for sentence in range(first, end):
                held += int(lengths[sentence])
                enough = held >= target and sentence - start >= 1 and end - sentence > 2
                if enough or sentence == end - 1:
                    rows.append((start, sentence + 1, target))
                    start, held, target = sentence + 1, 0, self._target_length(generator, longest)
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def _target_length(self, generator: np.random.Generator, longest: int) -> int:
        if generator.random() < self.config.short_seq_probability:
            return int(generator.integers(2, longest + 1))
        return longest

    def sample(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """One training sample.

        Shapes:
            tokens, token_types, labels int64 [s] (labels -100 where not masked); attention_mask bool [s], True for
            real tokens; sop_labels int64 scalar, 1 where the sentences are swapped.
        """
        # 2^40 samples an epoch and 2^24 epochs have keys of their own.
        generator = np.random.Generator(np.random.Philox(key=self.seed_key, counter=[0, 0, index, epoch + 1]))
        first, end, target = self.pairs[index].tolist()
        split = first + int(generator.integers(1, end - first))
        borders = self.sentences[[first, split, end]]
        a = np.asarray(self.tokens[borders[0] : borders[1]], dtype=np.int64)
        b = np.asarray(self.tokens[borders[1] : borders[2]], dtype=np.int64)
        swapped = bool(generator.random() < 0.5)
        if swapped:
            a, b = b, a
        a, b = truncate_pair(a, b, target, generator)
        cls, sep, pad = (self.special[name] for name in ("[CLS]", "[SEP]", "[PAD]"))
        tokens = np.concatenate([[cls], a, [sep], b, [sep]])
        labels = self._mask(tokens, len(a), target, generator)
        length = self.config.seq_length
        padding = (0, length - len(tokens))
        types = np.zeros(length, dtype=np.int64)
        types[len(a) + 2 : len(tokens)] = 1
        return {
            "tokens": np.pad(tokens, padding, constant_values=pad),
            "token_types": types,
            "attention_mask": np.arange(length) < len(tokens),
            "labels": np.pad(labels, padding, constant_values=IGNORE_LABEL),
            "sop_labels": np.int64(swapped),
        }

    def _mask(self, tokens: np.ndarray, length_a: int, target: int, generator: np.random.Generator) -> np.ndarray:
        """Mask `tokens` in place and return the labels; [CLS] and the [SEP]s are never masked."""
        share = self.config.mask_probability
        # At least one token where any is to be masked; Megatron-LM scores none in targets below 7.
        limit = max(min(share * target, round(share * len(tokens))), 1 if share > 0 else 0)
        ordinary = np.ones(len(tokens), dtype=bool)
        ordinary[[0, length_a + 1, len(tokens) - 1]] = False
        positions = np.flatnonzero(ordinary)
        # A continuation piece joins the word before it, also across [SEP] where truncation left one in front.
        starts = ~self.is_continuation[tokens[positions]]
        starts[0] = True
        borders = np.append(np.flatnonzero(starts), len(positions))
        covered = choose_spans(borders, limit, self.config.max_ngram, generator)
        chosen = positions[covered]
        labels = np.full(len(tokens), IGNORE_LABEL, dtype=np.int64)
        labels[chosen] = tokens[chosen]
        fate = generator.random(len(chosen))
        tokens[chosen[fate < 0.8]] = self.special["[MASK]"]
        replaced = chosen[fate >= 0.9]
        tokens[replaced] = generator.integers(0, self.vocab_size, len(replaced))
        return labels


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
