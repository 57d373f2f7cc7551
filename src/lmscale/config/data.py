"""The training text, its tokenizer, and how it is cut into samples: `tokenizer=` and `data=`."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from .checks import AtLeastTwo, Checked, Count, Fraction, PathText, Positive, Rule, refuse, require
from .family import corpus_forms

Undecodable = Literal["fall_back", "replace", "refuse"]
VALIDATION_EVERY = 30  # one document in 30 is held out: 29:1, as in the paper's corpus


@dataclass(frozen=True)
class TokenizerConfig(Checked):
    """`tokenizer=`: `trained` fits one on the training text; `gpt2` and `bert` read the published files.

    Args:
        kind: `trained` fits one on the training text; the others read published files.
        vocab_size: size to train; None: `model.vocab_size` if that is set and below 2,000, else 2,000.
        path: the published files or their folder: encoder.json and vocab.bpe (or vocab.json and merges.txt), vocab.txt,
            or tokenizer.json; None: from the Hugging Face hub. A vocab.txt without tokenizer_config.json is
            lower-cased.
        name: on the Hugging Face hub.
    """

    kind: Literal["trained", *corpus_forms()]
    vocab_size: Positive | None = None
    path: PathText | None = None
    name: str | None = None

    def check_rules(self) -> None:
        is_trained = self.kind == "trained"
        require(self, "vocab_size", "null unless `tokenizer` is trained", is_trained or self.vocab_size is None)
        for name in ("path", "name"):
            require(self, name, "null when `tokenizer` is trained", not is_trained or getattr(self, name) is None)
        check_one_source(self)


def check_one_source(tokenizer: Any) -> None:
    """Refuse a `name` beside a `path`, which would be read instead; the name that the published kind has anyway passes.

    Raises:
        ValueError: both say where the tokenizer is.
    """
    form = corpus_forms().get(tokenizer.kind)
    is_free = tokenizer.path is None or tokenizer.name in (None, form and form.hub_name)
    require(tokenizer, "name", "left out beside `path`", is_free)


_KINDS_THAT_READ = {
    "path": ("local", "indexed"),
    "validation_path": ("local", "indexed"),
    "name": ("huggingface",),
    "subset": ("huggingface",),
    "split": ("huggingface", "indexed"),
    "text_field": ("local", "huggingface"),
    "undecodable": ("local", "huggingface"),
}


@dataclass(frozen=True)
class DataConfig(Checked):
    """`data=`: where documents come from and how samples are cut.

    Args:
        kind: `embedded` (Python's own documentation), `local` (a file or folder of text, see `SourceConfig`),
            `huggingface` (a dataset by name) or `indexed` (binary token files).
        path: `local`: file or folder; `indexed`: prefix of .bin and .idx, folder of prepare_data.py, or weights by
            prefix.
        validation_path: the same for validation; None: held out by `validation_every`, of `indexed` by the folder or
            `split`.
        name: of the dataset for `huggingface`.
        subset: of the dataset for `huggingface`, its configuration.
        split: of the dataset; for `indexed` shares of training, validation and test documents.
        text_field: field of a JSONL line, parquet row or dataset row that holds the text.
        undecodable: as in preparation: `fall_back`, `replace` or `refuse` bytes that are not UTF-8.
        seq_length: tokens of a sample.
        validation_every: one document in this many is held out for validation.
        short_seq_probability: BERT: share of samples that are shorter than `seq_length` (Megatron-LM v1.0: 0.1).
        mask_probability: BERT: share of tokens that are masked (Megatron-LM v1.0: 0.15).
        max_ngram: BERT: longest span of words masked together (Megatron-LM v1.0: 3).
        cache_dir: of trained tokenizers and token files; None: $LMSCALE_CACHE or ~/.cache/lmscale.
        num_workers: loader processes per rank, at most four per core of the machine.
    """

    kind: Literal["embedded", "local", "huggingface", "indexed"]
    seq_length: Positive
    path: PathText | dict[PathText, object] | None = None
    validation_path: PathText | dict[PathText, object] | None = None
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    undecodable: Undecodable = "refuse"
    validation_every: AtLeastTwo = VALIDATION_EVERY
    short_seq_probability: Fraction = 0.1
    # With 0 BERT's loss would be a mean over no token.
    mask_probability: Annotated[Fraction, Rule("above 0", bool)] = 0.15
    max_ngram: Positive = 3
    cache_dir: PathText | None = None
    num_workers: Count = 0

    def check_rules(self) -> None:
        has_path = self.kind in _KINDS_THAT_READ["path"]
        for name, kinds in _KINDS_THAT_READ.items():
            is_free = self.kind in kinds or getattr(self, name) == getattr(DataConfig, name)
            require(self, name, f"left out unless `data` is {' or '.join(kinds)}", is_free)
        require(self, "name", "that of a dataset when `data` is huggingface", self.kind != "huggingface" or self.name)
        require(self, "path", f"a file or folder when `data` is {self.kind}", not has_path or self.path)
        for name in ("path", "validation_path"):
            weights = getattr(self, name) if isinstance(getattr(self, name), dict) else {}
            is_one = self.kind == "indexed" or not weights
            require(self, name, "one path, of a file or of a folder with all files, unless `data` is indexed", is_one)
            for prefix, weight in weights.items():
                if not isinstance(prefix, str):  # YAML reads 2024 and 1E5 as numbers
                    refuse(name, f"weights by path, such as ./{prefix}", weights)
                is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
                if not is_number or not 0 < weight < math.inf:
                    raise ValueError(f"`{name}` must give {prefix} a weight above 0, but gives {weight!r}")
        if self.kind == "indexed":
            self.split_shares()  # raises if it is invalid

    def split_shares(self) -> tuple[float, float, float]:
        """Shares of training, validation and test documents of an indexed dataset, adding up to 1.

        Raises:
            ValueError: `split` is not three numbers that are not negative, the first above 0.
        """
        try:
            shares = [float(share) for share in self.split.split(",")]
        except ValueError:
            shares = []
        are_shares = len(shares) == 3 and all(0 <= share < math.inf for share in shares) and shares[0] > 0
        require(self, "split", "the shares of training, validation and test documents, such as 969,30,1", are_shares)
        return tuple(share / sum(shares) for share in shares)
