"""Train a tokenizer on the corpus, with the same result in every process."""

from collections import Counter

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from ...config.checks import refuse
from ...config.family import family_of
from .published import BERT_SPECIALS, END_OF_TEXT, UNKNOWN, byte_level, frame_inputs, wordpiece

TRAINING_VERSION = 5  # incremented when the same files give a different tokenizer, to train cached ones again
NUM_BYTES = 256  # alphabet of a byte-level BPE
# WordPiece: rare letters take part in no merge, as with SentencePiece's `character_coverage` for Chinese and Japanese.
COVERAGE = 0.9995  # of all letters in the corpus
MIN_LETTERS = 200  # whatever they cover
_MAX_CODES = 0xFFFE  # of one private-use plane


def train_tokenizer(texts: list[str], family: str, vocab_size: int, key: str) -> tokenizers.Tokenizer:
    """Train a byte-level BPE or an uncased WordPiece; deterministic for the same texts in the same order.

    Args:
        key: configuration key of the size, for messages.

    Raises:
        ValueError: the size is too small for the letters of the texts.
    """
    return _TRAINERS[family_of(family).corpus.algorithm](texts, vocab_size, key)


def check_bpe_size(key: str, vocab_size: int) -> None:
    """Refuse a byte-level BPE that has no id left for its first merge."""
    if vocab_size <= NUM_BYTES:
        refuse(key, f"above {NUM_BYTES} (all bytes and {END_OF_TEXT})", vocab_size)


def _train_bpe(texts: list[str], vocab_size: int, key: str) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    check_bpe_size(key, vocab_size)
    tokenizer = byte_level(models.BPE())
    # The library reserves memory for the size: each merge shortens a text, so there are no more than bytes.
    most = NUM_BYTES + 1 + sum(len(text.encode("utf-8", "replace")) for text in texts)
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, most),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_wordpiece(texts: list[str], vocab_size: int, key: str) -> tokenizers.Tokenizer:
    """Train BERT's uncased WordPiece, with the same pieces and ids in every process.

    The library's WordPiece trainer numbers the `##` letters in the order of a randomly seeded hash map, and these
    numbers break ties between merges, so two processes can disagree. Here each letter has two code points, one for the
    start of a word and one for its inside. BPE merges are learned over them and mapped back to pieces with `##`. Rare
    letters get the ids that are left, and map to [UNK] where there are none.
    """
    blank = wordpiece(models.WordPiece(unk_token=UNKNOWN))
    words = Counter()
    for text in texts:
        normal = blank.normalizer.normalize_str(text)
        words.update(word for word, _ in blank.pre_tokenizer.pre_tokenize_str(normal))
    size = max(vocab_size - len(BERT_SPECIALS), 0)
    counts, forms = Counter(), Counter()
    for word, count in words.items():
        for place, letter in enumerate(word):
            counts[letter] += count
            forms[f"##{letter}" if place else letter] += count
    letters = sorted(_letters_to_merge(counts, forms, size))
    first = {letter: chr(0xF0000 + i) for i, letter in enumerate(letters)}  # private-use planes occur in no vocabulary
    inside = {letter: chr(0x100000 + i) for i, letter in enumerate(letters)}
    coded = (
        " ".join([first[word[0]] + "".join(inside[letter] for letter in word[1:])] * count)
        for word, count in sorted(words.items())
        if all(letter in first for letter in word)
    )
    merges = tokenizers.Tokenizer(models.BPE())
    merges.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    most = len(forms) + sum(map(len, words))  # of pieces; the library reserves memory for the size
    merges.train_from_iterator(coded, trainers.BpeTrainer(vocab_size=min(size, most), show_progress=False))
    plain = {code: letter for letter, code in (*first.items(), *inside.items())}
    codes = sorted(merges.get_vocab(), key=merges.token_to_id)
    pieces = [("##" if code[0] >= chr(0x100000) else "") + "".join(plain[c] for c in code) for code in codes]
    vocab = {piece: i for i, piece in enumerate((*BERT_SPECIALS, *pieces))}
    if len(vocab) > vocab_size:
        refuse(key, f"at least {len(vocab)} (special tokens and the corpus's letters)", vocab_size)
    rest = sorted(forms.keys() - vocab.keys(), key=lambda form: (-forms[form], form))[: vocab_size - len(vocab)]
    vocab |= {form: i for i, form in enumerate(rest, start=len(vocab))}
    tokenizer = wordpiece(models.WordPiece(vocab, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(BERT_SPECIALS))
    frame_inputs(tokenizer)
    return tokenizer


def _letters_to_merge(counts: Counter, forms: Counter, num_ids: int) -> list[str]:
    """Return the most frequent letters: MIN_LETTERS, then as many as COVERAGE needs and `num_ids` can hold.

    Args:
        counts: of each letter.
        forms: of each letter at the start of a word, and with `##` inside one: each has an id.
    """
    chosen, used, left = [], 0, counts.total()
    may_lack = (1 - COVERAGE) * left
    for letter in sorted(counts, key=lambda letter: (-counts[letter], letter))[:_MAX_CODES]:
        used += (letter in forms) + (f"##{letter}" in forms)
        if len(chosen) >= MIN_LETTERS and (left <= may_lack or used > num_ids):
            break
        chosen.append(letter)
        left -= counts[letter]
    return chosen


_TRAINERS = {"bpe": _train_bpe, "wordpiece": _train_wordpiece}
