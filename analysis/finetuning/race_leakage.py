"""Find passages of RACE's development set with near-duplicates in its training set.

    python analysis/finetuning/race_leakage.py

A near-duplicate has a Jaccard similarity of word 5-grams of at least 0.7 (section 4.1), computed exactly for MinHash
candidates. Data sets are read from $LMSCALE_DATA or ../shared/data. Prints the pairs and writes a record with their
ids.
"""

import argparse
import gzip
import json
import os
import sys
from pathlib import Path

import numpy as np

from lmscale.corpus.duplicates import candidate_pairs, exact_jaccard
from lmscale.corpus.minhash import band_hashes
from lmscale.corpus.shingles import shingle_sets
from lmscale.results import new_record, record_argument, write_record

ROOT = Path(__file__).resolve().parents[2]
NGRAM, BANDS, ROWS, JACCARD = 5, 25, 5, 0.7


def read_passages(path: Path) -> tuple[list[str], list[str]]:
    """Read ids and texts of passages, without repeated ids."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = {row["id"]: row["article"] for row in map(json.loads, file)}
    return list(rows), list(rows.values())


def main() -> int:
    """Find the pairs, print them and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, default=ROOT / "outputs" / "race_leakage.json")
    options = parser.parse_args()
    folder = Path(os.environ.get("LMSCALE_DATA", ROOT.parent / "shared" / "data")) / "race"
    if not folder.is_dir():
        print(f"error: no data at {folder}; set LMSCALE_DATA", file=sys.stderr)
        return 2
    dev_ids, dev = read_passages(folder / "race_dev.jsonl.gz")
    train_ids, train = read_passages(folder / "race_train.jsonl.gz")
    values, offsets = shingle_sets([*dev, *train], NGRAM)
    bands = band_hashes(values, offsets, BANDS, ROWS)
    found = [candidate_pairs(bands[:, band])[0] for band in range(BANDS)]
    pairs = np.unique(np.concatenate(found), axis=0)
    pairs = pairs[(pairs[:, 0] < len(dev)) & (pairs[:, 1] >= len(dev))]
    jaccard = exact_jaccard(values, offsets, pairs)
    listed = [
        {"dev": dev_ids[i], "train": train_ids[j - len(dev)], "jaccard": round(float(similarity), 4)}
        for (i, j), similarity in zip(pairs.tolist(), jaccard, strict=True)
        if similarity >= JACCARD
    ]
    for pair in listed:
        print(f"{pair['dev']:<16} {pair['train']:<16} {pair['jaccard']:.3f}")
    num_leaked = len({pair["dev"] for pair in listed})
    metrics = {
        "pairs": {"value": len(listed), "unit": "pairs"},
        "dev_passages": {"value": len(dev), "unit": "passages"},
        "dev_passages_in_train": {"value": num_leaked, "unit": "passages"},
        "share": {"value": 100 * num_leaked / len(dev), "unit": "% of dev"},
    }
    config = {"ngram": NGRAM, "bands": BANDS, "rows": ROWS, "jaccard": JACCARD, "pairs": listed}
    write_record(
        new_record("race_leakage", "run", config=config, seed=None, metrics=metrics, device="cpu"), options.record
    )
    print(f"{num_leaked} of {len(dev)} development passages in {len(listed)} pairs\nrecord: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
