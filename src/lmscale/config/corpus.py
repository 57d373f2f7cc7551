"""From raw corpora to binary token files: the typed form of `conf/prepare_data.yaml`."""

import re
from dataclasses import dataclass, field

from .checks import require_not_negative, require_one_of, require_positive
from .data import UNDECODABLE, TokenizerConfig
from .family import BUILT_IN
from .from_dict import build

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def _share(config: object, name: str) -> None:
    if not 0.0 < getattr(config, name) <= 1.0:
        raise ValueError(f"`{name}` must be above 0 and at most 1, but is {getattr(config, name)!r}")


@dataclass(frozen=True)
class SourceConfig:
    """`sources.<name>`: the source of one corpus and its weight in a blend.

    Args:
        kind: `local` (files) or `huggingface` (a dataset by name).
        path: a file or folder for `local`: .txt, .md, .tokens, .jsonl, .json, .tar (also .gz, .zst) or .parquet.
        name: of the dataset for `huggingface`.
        subset: of the dataset, its configuration.
        split: of the dataset.
        text_field: field of a JSONL line, parquet row or dataset row that holds the text.
        weight: share of training samples, relative to the other sources' weights; None: by tokens.
        undecodable: bytes that are not UTF-8: `fall_back` to cp1252 and Latin-1, `replace` by U+FFFD, or `refuse`.
            They are always counted.
        text_documents: in text files a document is a `block` between blank lines or the whole `file`.
        join_lines: join lines broken inside paragraphs, as in CC-Stories.
        architectures: models that may train on it (BooksCorpus: only BERT, because it overlaps LAMBADA).
    """

    kind: str
    path: str | None = None
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    weight: float | None = None
    undecodable: str = "fall_back"
    text_documents: str = "block"
    join_lines: bool = False
    architectures: list = field(default_factory=lambda: list(BUILT_IN))

    def __post_init__(self) -> None:
        require_one_of(self, "kind", ("local", "huggingface"))
        require_one_of(self, "undecodable", UNDECODABLE)
        require_one_of(self, "text_documents", ("block", "file"))
        if self.kind == "local" and self.path is None:
            raise ValueError("`path` must name a file or folder of a local source, but is null")
        if self.kind == "huggingface" and self.name is None:
            raise ValueError("`name` must name a dataset of a huggingface source, but is null")
        if self.weight is not None and not self.weight > 0:
            raise ValueError(f"`weight` must be above 0, but is {self.weight!r}")


@dataclass(frozen=True)
class CleaningConfig:
    """`cleaning=`: how each document is cleaned (section 4.1); `paper` or `none`.

    Args:
        repair_text: repair mojibake with ftfy.
        language: two-letter code of the language to keep; None: all.
        min_language_score: lowest probability of the language.
        min_tokens: shorter documents are dropped; 0 drops none.
    """

    repair_text: bool
    language: str | None
    min_language_score: float
    min_tokens: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_language_score <= 1.0:
            raise ValueError(f"`min_language_score` must be at least 0 and at most 1, but is {self.min_language_score}")
        require_not_negative(self, "min_tokens")


@dataclass(frozen=True)
class DedupConfig:
    """`dedup=`: near-duplicates by MinHash-LSH with an exact check; `paper` (0.7) or `none` (copies only).

    Args:
        jaccard: documents at least this similar are duplicates; None: near-duplicates are kept.
        ngram: words of a shingle.
        bands: of the LSH; a pair of similarity j becomes a candidate with probability 1 - (1 - j^rows)^bands.
        rows: of one band of the LSH.
        largest_bucket: up to this number, all documents with the same band value are compared with each other; in a
            larger bucket each only with its neighbour and the first, which is counted.
    """

    jaccard: float | None
    ngram: int = 5
    bands: int = 25
    rows: int = 5
    largest_bucket: int = 200

    def __post_init__(self) -> None:
        require_positive(self, "ngram", "bands", "rows")
        if self.jaccard is not None:
            _share(self, "jaccard")
        if self.largest_bucket < 2:
            raise ValueError(f"`largest_bucket` must be at least 2, but is {self.largest_bucket}")


@dataclass(frozen=True)
class EvaluationSetConfig:
    """`evaluation_sets.<name>`: a test set whose text is removed from the training data.

    Args:
        form: `wikitext` (articles under ` = Title = ` lines) or `records` (one text per row or line).
        path: a local file; None loads `name` from the Hugging Face hub or its cache.
        name: of the dataset on the hub.
        subset: of the dataset, its configuration.
        split: of the dataset.
        text_field: field of a row that holds the text.
    """

    form: str
    path: str | None = None
    name: str | None = None
    subset: str | None = None
    split: str = "test"
    text_field: str = "text"

    def __post_init__(self) -> None:
        require_one_of(self, "form", ("wikitext", "records"))
        if self.path is None and self.name is None:
            raise ValueError("`path` or `name` must say where the evaluation set is, but both are null")


@dataclass(frozen=True)
class OverlapConfig:
    """`overlap.*`: when a document counts as containing evaluation text.

    Args:
        ngram: words of an n-gram, 8 in the paper.
        share: a document is removed if at least this share of an evaluation item's n-grams occurs in it.
    """

    ngram: int = 8
    share: float = 0.5

    def __post_init__(self) -> None:
        require_positive(self, "ngram")
        _share(self, "share")


@dataclass(frozen=True)
class LauncherConfig:
    """`launcher=`: `local` processes, or jobs of a `slurm` or `ray` cluster.

    Args:
        kind: `local`, `slurm` or `ray`.
        workers: tasks at a time; None: one per core (local) or no limit (clusters).
        partition: of Slurm jobs.
        time: limit of a Slurm job.
        memory_gb: memory of a task in GB.
        sbatch: further options of sbatch, by name.
    """

    kind: str
    workers: int | None = None
    partition: str | None = None
    time: str = "24:00:00"
    memory_gb: int = 4
    sbatch: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_one_of(self, "kind", ("local", "slurm", "ray"))
        require_positive(self, "memory_gb")
        if self.workers is not None:
            require_positive(self, "workers")
        if self.kind == "slurm" and self.partition is None:
            raise ValueError("`partition` must name a partition of the Slurm cluster, but is null")


@dataclass(frozen=True)
class PrepareConfig:
    """One preparation of a corpus.

    Args:
        output: folder of the binary dataset; created when everything is complete.
        architecture: `gpt` (a sequence is a document) or `bert` (a sequence is a sentence).
        sources: corpora by name.
        tokenizer: published or trained on the cleaned text.
        evaluation_sets: test sets by name, for removal and the leakage report.
        validation_every: one document in this many is held out; 30 gives the paper's 29:1.
        max_bad_rows: rows of one file that cannot be read (invalid JSON, no text) before it is refused.
        duplicate_ids: `count` documents that share an id, or `refuse` them.
        shard_mb: stored input per shard in MB; does not affect results and is fixed once a preparation has started. A
            task needs two to four times the text of its shard in memory, and packed files are about three times as
            large when unpacked.
        keep_work: keep the intermediate files, several times the size of the corpus.

    Raises:
        ValueError: an invalid value.
    """

    output: str
    architecture: str
    sources: dict[str, SourceConfig]
    tokenizer: TokenizerConfig
    cleaning: CleaningConfig
    dedup: DedupConfig
    evaluation_sets: dict[str, EvaluationSetConfig]
    overlap: OverlapConfig
    launcher: LauncherConfig
    validation_every: int = 30
    max_bad_rows: int = 0
    duplicate_ids: str = "count"
    shard_mb: int = 256
    keep_work: bool = False

    def __post_init__(self) -> None:
        require_one_of(self, "architecture", BUILT_IN)
        require_one_of(self, "duplicate_ids", ("count", "refuse"))
        require_positive(self, "shard_mb")
        if self.validation_every < 2:
            raise ValueError(f"`validation_every` must be at least 2, but is {self.validation_every}")
        require_not_negative(self, "max_bad_rows")
        if not self.sources:
            raise ValueError("`sources` must name at least one corpus, but is empty")
        for key, names in (("sources", self.sources), ("evaluation_sets", self.evaluation_sets)):
            wrong = [name for name in names if not _NAME.fullmatch(name)]
            if wrong:
                raise ValueError(f"`{key}` must have names of letters, digits, - and _, but has {wrong[0]!r}")
        weighted = [name for name, source in self.sources.items() if source.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            rest = next(name for name in self.sources if name not in weighted)
            raise ValueError(f"`sources.{rest}.weight` must be given where another source has a weight, but is null")

    @classmethod
    def from_dict(cls, values: dict) -> "PrepareConfig":
        """Build from plain values; `run_dir` and `overrides`, which the entry point adds, are not part of it.

        Raises:
            ValueError: an unknown key, a missing one or a value of a different type.
        """
        return build(cls, {key: value for key, value in values.items() if key not in ("run_dir", "overrides")}, "")
