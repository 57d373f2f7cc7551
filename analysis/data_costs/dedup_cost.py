"""Measure the speed of near-duplicate search, and of the search for text of test sets, on one core.

    python analysis/data_costs/dedup_cost.py --race FOLDER

Runs on all training passages of RACE, several rounds: LSH with 25 bands of 5 rows over sets of lower-cased 5-grams of
words, with an exact check at Jaccard 0.7. The committed record also compares with datatrove's stock pipeline, rensa
and datasketch on a sample; the script of its commit did that.
"""

import argparse
import gzip
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported

import numpy as np

from lmscale.corpus.duplicates import candidate_pairs, causes, choose_survivors, clusters, exact_jaccard
from lmscale.corpus.minhash import band_hashes
from lmscale.corpus.overlap import EvaluationIndex
from lmscale.corpus.shingles import shingle_sets, word_ngrams
from lmscale.results import new_record, record_argument, write_record

ROOT = Path(__file__).resolve().parents[2]
NGRAM, BANDS, ROWS, THRESHOLD = 5, 25, 5, 0.7
BATCH = 2000  # documents per batch of shingling


def ours(texts: list[str]) -> int:
    """Run all our steps; returns the number of removed documents."""
    values, counts, hashes = [], [np.zeros(1, dtype=np.int64)], []
    for start in range(0, len(texts), BATCH):
        some, offsets = shingle_sets(texts[start : start + BATCH], NGRAM)
        hashes.append(band_hashes(some, offsets, BANDS, ROWS))
        values.append(some)
        counts.append(np.diff(offsets))
    pairs = np.concatenate([candidate_pairs(band)[0] for band in np.concatenate(hashes).T])
    pairs = np.unique(pairs, axis=0)
    jaccard = exact_jaccard(np.concatenate(values), np.cumsum(np.concatenate(counts)), pairs)
    pairs, jaccard = pairs[jaccard >= THRESHOLD], jaccard[jaccard >= THRESHOLD]
    labels = clusters(len(texts), pairs)
    keep = choose_survivors(labels, np.array([len(text) for text in texts]))
    causes(labels, keep, pairs, jaccard)
    return int((~keep).sum())


def contaminated(train: list[str], dev: list[str]) -> int:
    """Count train passages that contain half of the 8-grams of a dev passage, including the index's construction."""
    index, found = EvaluationIndex({"dev": dev}, 8), 0
    for start in range(0, len(train), BATCH):
        documents, _, _ = index.contaminates(*word_ngrams(train[start : start + BATCH], 8), 0.5)
        found += len(np.unique(documents))
    return found


def spread(name: str, values: list[float], unit: str) -> dict[str, dict]:
    """Median, minimum and maximum over the rounds."""
    found = {"": statistics.median(values), "/lowest": min(values), "/highest": max(values)}
    return {name + ending: {"value": value, "unit": unit} for ending, value in found.items()}


def read_articles(path: Path) -> list[str]:
    """Read the passages of a RACE file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["article"] for line in file]


def main() -> int:
    """Measure, print the results and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--race", type=Path, required=True, help="folder of race_train.jsonl.gz and race_dev.jsonl.gz")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=record_argument, default=ROOT / "outputs" / "dedup_cost.json")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    train, dev = (read_articles(options.race / f"race_{split}.jsonl.gz") for split in ("train", "dev"))
    megabytes = sum(len(text.encode()) for text in train) / 1e6
    duplicates, overlap = [], []
    for _ in range(options.rounds):
        start = time.perf_counter()
        removed = ours(train)
        middle = time.perf_counter()
        found = contaminated(train, dev)
        duplicates.append(megabytes / (middle - start))
        overlap.append(megabytes / (time.perf_counter() - middle))
    metrics = spread("whole/ours", duplicates, "MB/s") | spread("whole/evaluation_text", overlap, "MB/s")
    metrics["whole/removed"] = {"value": removed, "unit": "documents"}
    metrics["whole/evaluation_text/documents"] = {"value": found, "unit": "train passages with dev text"}
    config = {"corpus": "RACE", "documents": len(train), "rounds": options.rounds}
    config |= {"ngram": NGRAM, "bands": BANDS, "rows": ROWS, "jaccard": THRESHOLD}
    layout = {"threads": 1}
    record = new_record("dedup_cost", "run", config=config, seed=1234, metrics=metrics, device="cpu", layout=layout)
    write_record(record, options.record)
    print(json.dumps({name: entry["value"] for name, entry in metrics.items()}, indent=1))
    print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
