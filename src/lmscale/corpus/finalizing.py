"""Finalize a dataset: merge the shards, write the reports, and write the manifest last."""

import hashlib
import json
import os
import shutil
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..config.family import family_of
from ..data.indexed_corpus import MANIFEST, MANIFEST_FORMAT, TOKENIZER
from ..data.indexed_writer import IndexedDataset, merge
from ..data.prepare import note_missing_pieces, note_unknown
from ..data.tokenizer import read_tokenizer
from .cleaning import NUM_SAMPLES
from .evaluation_sets import evaluation_index
from .tokenizing import SPLITS, kept_batches, split_of
from .work_folder import WorkFolder, save_json, save_table

REPORTS = "reports"
_STAGE_LABELS = {
    "clean": "cleaned",
    "sort": "sorted",
    "candidates": "candidates",
    "resolve": "near-duplicates",
    "tokenize": "tokenized",
}


def merge_shards(work: WorkFolder, rank: int) -> dict[str, int]:
    """Merge the shards' binary datasets into one per source and split.

    Raises:
        ValueError: a shard is not tokenized.
    """
    # A shard without documents of this part has no dataset, but every complete one has this file.
    work.task_files("overlap", stage="tokenize", num_tasks=work.num_shards, ending="parquet")
    source, split = work.parts[rank]
    prefixes = [work.path("tokens", shard, f"{source}_{split}") for shard in range(work.num_shards)]
    prefixes = [prefix for prefix in prefixes if _exists(prefix)]
    if prefixes:
        target = work.path("joined", part_name(work, source, split))
        target.parent.mkdir(parents=True, exist_ok=True)
        merge(prefixes, target)
    return {}


def part_name(work: WorkFolder, source: str, split: str) -> str:
    """Return the prefix of a part's files in Megatron-LM's form: `wikipedia_train_text_document`."""
    return f"{source}_{split}_text_{family_of(work.config.architecture).corpus.sequence}"


def finalize_dataset(work: WorkFolder, rank: int) -> dict[str, int]:
    """Move the dataset to the output folder with tokenizer and reports; the manifest, written last, completes it.

    Raises:
        ValueError: a source has no documents left, or for BERT none of two sentences, or no document is held out.
    """
    output, joined = work.output, work.path("joined")
    for index in joined.glob("*.idx"):  # an earlier attempt stopped after it had moved the .bin
        if not index.with_suffix(".bin").is_file():
            os.replace(index, output / index.name)
    tokenizer = read_tokenizer(work.path(TOKENIZER))
    sources = _describe_sources(work)
    stages = _stages(work)
    _check_left(work, sources, stages)
    reports = _write_reports(work, output / REPORTS)
    for file in sorted(joined.glob("*")):
        os.replace(file, output / file.name)
    shutil.copyfile(work.path(TOKENIZER), output / TOKENIZER)
    facts = json.loads(work.path("plan.json").read_text(encoding="utf-8"))["facts"]
    manifest = {
        "format": MANIFEST_FORMAT,
        "architecture": work.config.architecture,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "sources": sources,
        "stages": stages,
        "reports": reports,
        "inputs": _inputs(work),
        "config": facts["config"],
        "versions": facts["versions"],
    }
    save_json(output / MANIFEST, manifest)
    if not work.config.keep_work:
        for path in work.root.iterdir():
            if path.is_dir() and path.name != "logs":  # this task still writes to the logs
                shutil.rmtree(path)
    return {}


def _describe_sources(work: WorkFolder) -> dict[str, dict]:
    found: dict[str, dict] = {name: {} for name in sorted(work.config.sources)}
    for source, split in work.parts:
        name = part_name(work, source, split)
        # An earlier attempt may have moved some of them already.
        prefix = next((p for p in (work.path("joined", name), work.output / name) if _exists(p)), None)
        if prefix is None:
            continue
        dataset = IndexedDataset(prefix)
        with open(f"{prefix}.bin", "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[source][split] = {
            "prefix": name,
            "documents": dataset.num_documents,
            "tokens": dataset.num_tokens,
            "sha256": digest,
        }
        level = family_of(work.config.architecture).corpus.sequence
        if level == "sentence":  # a document of one sentence gives no pair
            pairs = int((np.diff(dataset.document_indices) > 1).sum())
            found[source][split]["documents_with_a_pair"] = pairs
    for name, held in found.items():
        given = work.config.sources[name].weight
        held["weight"] = given if given is not None else float(held.get("train", {}).get("tokens", 0))
    return found


def _check_left(work: WorkFolder, sources: dict[str, dict], stages: dict) -> None:
    empty = [name for name, held in sources.items() if "train" not in held]
    counts = ", ".join(
        f"{step}: {label} {value}"
        for stage in ("clean", "sort", "resolve", "tokenize")
        for step, held in stages.get(stage, {}).items()
        for label, value in held.items()
    )
    if empty:
        cleaning = work.config.cleaning
        advice = f"; cleaning=none output={work.config.output}_uncleaned keeps all languages and lengths"
        raise ValueError(
            f"`sources.{empty[0]}` must have documents left to train on, but has none ({counts})"
            + (advice if cleaning.language is not None or cleaning.min_tokens else "")
        )
    for name, held in sources.items():
        if held["train"].get("documents_with_a_pair") == 0:
            raise ValueError(
                f"`sources.{name}` must have documents of two sentences or more for "
                f"architecture={work.config.architecture}, but all {held['train']['documents']} have one"
            )
    if not any("validation" in held for held in sources.values()):
        raise ValueError(
            f"`validation_every` must hold out at least one document, but {work.config.validation_every} held "
            f"out none{_smaller_interval(work)} ({counts})"
        )


def _smaller_interval(work: WorkFolder) -> str:
    """Name the largest `validation_every` that leaves documents for both splits; empty if none does."""
    tables = (table for shard in range(work.num_shards) for table in kept_batches(work, shard, ["key"]))
    keys = [key for table in tables for key in table["key"].to_pylist()]
    for every in range(min(work.config.validation_every, len(keys)), 1, -1):
        if {split_of(key, every) for key in keys} == set(SPLITS):
            return f"; validation_every={every} output={work.config.output}_{every} does"
    return ""


def _stages(work: WorkFolder) -> dict[str, dict[str, dict[str, int]]]:
    """Return the counts of each stage and step, summed over tasks."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for logs in sorted(work.path("logs").iterdir()):
        for file in sorted((logs / "stats").glob("*.json")):
            for step in json.loads(file.read_text(encoding="utf-8")):
                held = found.setdefault(logs.name, {}).setdefault(step["name"].split(": ", 1)[-1], {})
                for label, value in step["stats"].items():
                    total = value["total"] if isinstance(value, dict) else value
                    held[label] = held.get(label, 0) + int(total)
    return found


def _inputs(work: WorkFolder) -> list[dict]:
    """Return name, size and sha256 of every input, as written by the tasks of the first stage."""
    found: list[dict] = []
    for file in sorted(work.path("inputs").glob("[0-9]*.json")):
        found += json.loads(file.read_text(encoding="utf-8"))
    return sorted(found, key=itemgetter("source", "file"))


def _write_reports(work: WorkFolder, folder: Path) -> dict:
    """Write the reports as files; return their summaries for the manifest."""
    folder.mkdir(exist_ok=True)
    save_json(folder / "dropped.json", _dropped(work))
    copies = _concatenate(work, "sorted", "copies.parquet")
    save_table(folder / "copies.parquet", copies)
    summary = {"copies": len(copies)}
    duplicates = work.path("duplicates.parquet")
    if duplicates.is_file():
        table = pq.read_table(duplicates)
        save_table(folder / "duplicates.parquet", table)
        survivors = len(set(zip(table["survivor_key"].to_pylist(), strict=True)))
        summary |= {"near_duplicates": len(table), "clusters": survivors}
    if work.config.evaluation_sets:
        contaminated = _concatenate(work, "overlap", "parquet")
        save_table(folder / "contaminated.parquet", contaminated)
        summary["leakage"] = _leakage(work, contaminated)
        save_json(folder / "leakage.json", summary["leakage"])
    return summary


def _dropped(work: WorkFolder) -> dict[str, list[dict]]:
    """Return examples of dropped documents by reason, the first ones in order of their files."""
    found: dict[str, list[dict]] = {}
    for file in sorted(work.path("dropped").rglob("[0-9]*.json")):
        for reason, examples in json.loads(file.read_text(encoding="utf-8")).items():
            found.setdefault(reason, []).extend(examples)
    place = itemgetter("source", "file", "row")
    return {reason: sorted(held, key=place)[:NUM_SAMPLES] for reason, held in sorted(found.items())}


def _leakage(work: WorkFolder, contaminated: pa.Table) -> dict:
    """Measure how much of each evaluation set occurs in the training split, as in section 5.2."""
    index = evaluation_index(work)
    seen = index.new_seen()
    for shard in range(work.num_shards):
        seen |= np.load(work.shard_file("overlap", shard, "seen.npy"))
    removed: dict[str, set] = {}
    for row in contaminated.to_pylist():
        removed.setdefault(row["item"].split("/")[0], set()).add((row["source"], row["file"], row["row"]))
    report = index.overlap(seen)
    return {name: held | {"documents_removed": len(removed.get(name, ()))} for name, held in report.items()}


def _concatenate(work: WorkFolder, kind: str, ending: str) -> pa.Table:
    shards = range(work.num_shards)
    return pa.concat_tables([pq.read_table(work.shard_file(kind, shard, ending)) for shard in shards])


def summarize(output: Path) -> str:
    """Describe the dataset in `output` for the terminal: counts per stage, sizes per part and the leakage table."""
    manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    lines = [f"wrote {output}"]
    for stage, label in _STAGE_LABELS.items():
        for step, counts in manifest["stages"].get(stage, {}).items():
            if counts:
                text = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items())
                lines.append(f"  {label:<16} {step}: {text}")
    for name, held in manifest["sources"].items():
        for split in ("train", "validation"):
            if split in held:
                part = held[split]
                lines.append(f"  {name} {split}: {part['documents']:,} documents, {part['tokens']:,} tokens")
    for name, held in manifest["reports"].get("leakage", {}).items():
        text = ", ".join(
            f"{key.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{key.replace('_', ' ')} {value:,}"
            for key, value in held.items()
        )
        lines.append(f"  leakage of {name}: {text}")
    fitted = manifest["config"]["tokenizer"]
    unknown = manifest["stages"]["tokenize"]["tokenize"].get("unknown_tokens", 0)
    tokens = sum(held[split]["tokens"] for held in manifest["sources"].values() for split in SPLITS if split in held)
    notes = note_missing_pieces(fitted["vocab_size"], manifest["vocab_size"])
    lines += [f"note: {note}" for note in (*notes, *note_unknown(unknown, tokens, fitted["kind"]))]
    return "\n".join(lines)


def _exists(prefix: Path) -> bool:
    return Path(f"{prefix}.idx").is_file()
