"""From raw corpora to binary token files: the typed form of `conf/prepare_data.yaml`."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from .checks import AboveZero, AtLeastTwo, Checked, Count, PathText, Positive, Rule, Share, require
from .data import VALIDATION_EVERY, TokenizerConfig, Undecodable
from .family import BUILT_IN
from .from_dict import EntryConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class SourceConfig(Checked):
    """`sources.<name>`: the source of one corpus and its weight in a blend.

    Args:
        kind: files, or a dataset by name.
        path: file or folder of `local`: .txt, .md, .tokens, .jsonl, .json, .tar (also .gz, .zst) or .parquet.
        name: of the dataset for `huggingface`.
        subset: of the dataset, its configuration.
        split: of the dataset.
        text_field: field of a JSONL line, parquet row or dataset row that holds the text.
        weight: share of training samples, relative to the other sources' weights; None: by tokens.
        undecodable: bytes that are not UTF-8: decoded as cp1252 or Latin-1 (`fall_back`), replaced by U+FFFD, or
            refused.
        text_documents: in text files a document is a `block` between blank lines or the whole `file`.
        join_lines: join lines broken inside paragraphs, as in CC-Stories.
        architectures: models that may train on it (BooksCorpus: only BERT, because it overlaps LAMBADA).
    """

    kind: Literal["local", "huggingface"]
    path: PathText | None = None
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    weight: AboveZero | None = None
    undecodable: Undecodable = "fall_back"
    text_documents: Literal["block", "file"] = "block"
    join_lines: bool = False
    architectures: list = field(default_factory=lambda: list(BUILT_IN))

    def check_rules(self) -> None:
        require(self, "path", "a file or folder for a local source", self.kind != "local" or self.path is not None)
        is_named = self.kind != "huggingface" or self.name
        require(self, "name", "that of a dataset for a huggingface source", is_named)


@dataclass(frozen=True)
class CleaningConfig(Checked):
    """`cleaning=`: how each document is cleaned (section 4.1); `paper` or `none`.

    Args:
        repair_text: repair mojibake with ftfy.
        language: two-letter code of the language to keep; None: all.
        min_language_score: lowest probability of the language.
        min_tokens: shorter documents are dropped; 0 drops none.
    """

    repair_text: bool
    language: str | None
    min_language_score: Annotated[float, Rule("at least 0 and at most 1", lambda number: 0 <= number <= 1)]
    min_tokens: Count


@dataclass(frozen=True)
class DedupConfig(Checked):
    """`dedup=`: near-duplicates by MinHash-LSH with an exact check; `paper` (0.7) or `none` (copies only).

    Args:
        jaccard: documents at least this similar are duplicates; None: near-duplicates are kept.
        ngram: words of a shingle.
        bands: of the LSH: a pair of similarity j becomes a candidate with probability 1 - (1 - j^rows)^bands.
        rows: of one band of the LSH.
        largest_bucket: documents with the same band value are all compared, in larger buckets each only with its
            neighbour and the first.
    """

    jaccard: Share | None
    ngram: Positive = 5
    bands: Positive = 25
    rows: Positive = 5
    largest_bucket: AtLeastTwo = 200


@dataclass(frozen=True)
class EvaluationSetConfig(Checked):
    """`evaluation_sets.<name>`: a test set whose text is removed from the training data.

    Args:
        form: `wikitext` (articles under ` = Title = ` lines) or `records` (one text per row or line).
        path: a local file; None loads `name` from the Hugging Face hub or its cache.
        name: of the dataset on the hub.
        subset: of the dataset, its configuration.
        split: of the dataset.
        text_field: field of a row that holds the text.
    """

    form: Literal["wikitext", "records"]
    path: PathText | None = None
    name: str | None = None
    subset: str | None = None
    split: str = "test"
    text_field: str = "text"

    def check_rules(self) -> None:
        if self.path is None and self.name is None:
            raise ValueError("`path` or `name` must say where the evaluation set is, but both are null")


@dataclass(frozen=True)
class OverlapConfig(Checked):
    """`overlap.*`: when a document counts as containing evaluation text.

    Args:
        ngram: words of an n-gram, 8 in the paper.
        share: a document is removed if at least this share of an evaluation item's n-grams occurs in it.
    """

    ngram: Positive = 8
    share: Share = 0.5


@dataclass(frozen=True)
class LauncherConfig(Checked):
    """`launcher=`: `local` processes, or jobs of a `slurm` or `ray` cluster.

    Args:
        kind: where tasks run.
        workers: tasks at a time; None: one per core (local) or no limit (clusters).
        partition: of Slurm jobs.
        time: limit of a Slurm job.
        memory_gb: memory of a task in GB.
        sbatch: further options of sbatch, by name.
    """

    kind: Literal["local", "slurm", "ray"]
    workers: Positive | None = None
    partition: str | None = None
    time: str = "24:00:00"
    memory_gb: Positive = 4
    sbatch: dict = field(default_factory=dict)

    def check_rules(self) -> None:
        is_named = self.kind != "slurm" or self.partition is not None
        require(self, "partition", "a partition of the Slurm cluster", is_named)


@dataclass(frozen=True)
class PrepareConfig(EntryConfig):
    """One preparation of a corpus.

    Args:
        output: folder of the binary dataset; created when everything is complete.
        architecture: `gpt` (a sequence is a document) or `bert` (a sequence is a sentence).
        sources: corpora by name.
        tokenizer: published or trained on the cleaned text.
        evaluation_sets: test sets by name, for removal and the leakage report.
        validation_every: one document in this many is held out; 30 gives the paper's 29:1.
        max_bad_rows: unusable rows of one file (invalid JSON, no text, a zero character) before it is refused.
        duplicate_ids: `count` documents that share an id, or `refuse` them.
        shard_mb: stored input per shard in MB; results do not depend on it. A task needs two to four times the text of
            its shard in memory.
        keep_work: keep the intermediate files, several times the size of the corpus.

    Raises:
        ValueError: an invalid value.
    """

    output: PathText
    architecture: Literal[*BUILT_IN]
    sources: dict[str, SourceConfig]
    tokenizer: TokenizerConfig
    cleaning: CleaningConfig
    dedup: DedupConfig
    evaluation_sets: dict[str, EvaluationSetConfig]
    overlap: OverlapConfig
    launcher: LauncherConfig
    validation_every: AtLeastTwo = VALIDATION_EVERY
    max_bad_rows: Count = 0
    duplicate_ids: Literal["count", "refuse"] = "count"
    shard_mb: Positive = 256
    keep_work: bool = False

    def check_rules(self) -> None:
        if not self.sources:
            raise ValueError("`sources` must name at least one corpus, but is empty")
        for key, names in (("sources", self.sources), ("evaluation_sets", self.evaluation_sets)):
            wrong = [name for name in names if not (isinstance(name, str) and _NAME.fullmatch(name))]
            if wrong:
                rule = "names of letters, digits, - and _, with quotes around a number"
                raise ValueError(f"`{key}` must have {rule}, but has {wrong[0]!r}")
        weighted = [name for name, source in self.sources.items() if source.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            rest = next(name for name in self.sources if name not in weighted)
            raise ValueError(f"`sources.{rest}.weight` must be given where another source has a weight, but is null")
