"""Tokenizers: trained on the corpus, or published by the authors of GPT-2 and BERT."""

from .encoding import Tokenizer, read_tokenizer, write_tokenizer
from .loading import DEFAULT_VOCAB_SIZE, check_tokenizer, load_published_tokenizer, load_tokenizer
from .published import BERT_SPECIALS, END_OF_TEXT
from .training import train_tokenizer

__all__ = [
    "BERT_SPECIALS",
    "DEFAULT_VOCAB_SIZE",
    "END_OF_TEXT",
    "Tokenizer",
    "check_tokenizer",
    "load_published_tokenizer",
    "load_tokenizer",
    "read_tokenizer",
    "train_tokenizer",
    "write_tokenizer",
]
