"""The training text, its tokenizer, and how it is cut into samples: `tokenizer=` and `data=`."""

import math
from dataclasses import dataclass

from .checks import require_above_zero, require_fraction, require_not_negative, require_one_of, require_positive
from .family import corpus_forms

UNDECODABLE = ("fall_back", "replace", "refuse")


@dataclass(frozen=True)
class TokenizerConfig:
    """`tokenizer=`: `trained` fits one on the training text; `gpt2` and `bert` read the published files.

    Args:
        kind: `trained`, `gpt2` or `bert`.
        vocab_size: size to train; None: `model.vocab_size` if that is set and below 2,000, else 2,000.
        path: for gpt2 a folder with encoder.json/vocab.bpe (or vocab.json/merges.txt), for bert a vocab.txt or its
            folder, for both a tokenizer.json or its folder. The settings of a tokenizer_config.json beside them are
            honoured, or refused by their names. A vocab.txt without one is lower-cased, as in transformers; write
            do_lower_case false into one for a cased vocabulary. None loads `name` from the Hugging Face hub or its
            cache.
        name: on the Hugging Face hub.
    """

    kind: str
    vocab_size: int | None = None
    path: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        kinds = ("trained", *corpus_forms())
        if self.kind not in kinds:
            raise ValueError(f"`tokenizer.kind` must be one of {', '.join(kinds)}, but is {self.kind!r}")
        if self.vocab_size is not None:
            require_positive(self, "vocab_size")


@dataclass(frozen=True)
class DataConfig:
    """`data=`: where documents come from and how samples are cut.

    Args:
        kind: `embedded` (Python's own documentation), `local` (a file or folder of text, see `SourceConfig`),
            `huggingface` (a dataset by name) or `indexed` (binary token files).
        path: for `local` a file or folder. For `indexed` the prefix of a .bin and .idx, a folder of
            prepare_data.py, or weights by prefix.
        validation_path: the same for validation. None: for `local` every `validation_every`-th document is held out;
            for `indexed` a folder has its own validation part, and others are cut by `split`.
        name: of the dataset for `huggingface`.
        subset: of the dataset for `huggingface`, its configuration.
        split: of the dataset for `huggingface`; for `indexed` the shares of training, validation and test documents.
        text_field: field of a JSONL line, parquet row or dataset row that holds the text.
        undecodable: bytes that are not UTF-8: `refuse`, `replace` by U+FFFD, or `fall_back` to cp1252 and Latin-1,
            counted by row.
        seq_length: tokens of a sample.
        validation_every: one document in this many is held out for validation.
        short_seq_probability: BERT: share of samples that are shorter than `seq_length` (Megatron-LM v1.0: 0.1).
        mask_probability: BERT: share of tokens that are masked (Megatron-LM v1.0: 0.15).
        max_ngram: BERT: longest span of words masked together (Megatron-LM v1.0: 3).
        cache_dir: where trained tokenizers and token files are kept; None means $LMSCALE_CACHE or ~/.cache/lmscale.
        num_workers: loader processes per rank, at most four per core of the machine.
    """

    kind: str
    seq_length: int
    path: str | dict | None = None
    validation_path: str | dict | None = None
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    undecodable: str = "refuse"
    validation_every: int = 30
    short_seq_probability: float = 0.1
    mask_probability: float = 0.15
    max_ngram: int = 3
    cache_dir: str | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        require_one_of(self, "kind", ("embedded", "local", "huggingface", "indexed"))
        require_one_of(self, "undecodable", UNDECODABLE)
        require_positive(self, "seq_length", "max_ngram")
        if self.validation_every < 2:
            raise ValueError(f"`data.validation_every` must be at least 2, but is {self.validation_every}")
        require_not_negative(self, "num_workers")
        if self.validation_path is not None and self.kind not in ("local", "indexed"):
            raise ValueError(
                f"`data.validation_path` must be null unless `data` is local or indexed, but is "
                f"{self.validation_path!r}"
            )
        if self.kind == "huggingface" and self.name is None:
            raise ValueError("`data.name` must name a dataset when `data` is huggingface, but is null")
        if self.kind == "local" and self.path is None:
            raise ValueError("`data.path` must name a file or folder when `data` is local, but is null")
        for name in ("path", "validation_path"):
            self._check_path(name)
        if self.kind == "indexed":
            self.split_shares()  # raises if it is invalid
        require_fraction(self, "short_seq_probability", "mask_probability")
        require_above_zero(self, "mask_probability")  # else BERT's loss would be a mean over no token

    def split_shares(self) -> tuple[float, float, float]:
        """Shares of training, validation and test documents of an indexed dataset, adding up to 1.

        Raises:
            ValueError: `split` is not three numbers that are not negative, the first above 0.
        """
        rule = "must be the shares of training, validation and test documents, such as 969,30,1"
        try:
            shares = [float(share) for share in self.split.split(",")]
        except ValueError:
            shares = []
        if len(shares) != 3 or not all(0 <= share < math.inf for share in shares) or shares[0] == 0:
            raise ValueError(f"`data.split` {rule}, but is {self.split!r}")
        return tuple(share / sum(shares) for share in shares)

    def _check_path(self, name: str) -> None:
        path = getattr(self, name)
        if self.kind == "indexed" and name == "path" and not path:
            raise ValueError("`data.path` must name a dataset when `data` is indexed, but is null")
        if not isinstance(path, dict):
            return
        if self.kind != "indexed":
            raise ValueError(f"`data.{name}` must be one path unless `data` is indexed, but is {path!r}")
        for prefix, weight in path.items():
            is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            if not is_number or not 0 < weight < math.inf:
                raise ValueError(f"`data.{name}` must give {prefix} a weight above 0, but gives {weight!r}")
