"""Tokenizers: trained on the corpus, or published by the authors of GPT-2 and BERT."""

from .choice import choose_tokenizer
from .encoding import Tokenizer, read_tokenizer, write_tokenizer
from .loading import DEFAULT_VOCAB_SIZE, check_tokenizer, load_published_tokenizer, load_tokenizer, load_tokenizer_at
from .published import BERT_SPECIALS, END_OF_TEXT, UNKNOWN
from .training import train_tokenizer
