"""Compare the speed of near-duplicate search on one core with datatrove's stock pipeline, rensa and datasketch.

    python analysis/data_costs/dedup_cost.py --race ../shared/data/race

Runs on passages of RACE: all methods in alternation on the same sample for several rounds, then ours on the whole
training set with the time of each step. Ours, rensa and datasketch use LSH with 25 bands of 5 rows over sets of
lower-cased `\\w+` 5-grams, with an exact check at Jaccard 0.7. datatrove runs with its defaults (spaCy's words, 14
bands of 8 rows, no check), without reading and writing the documents. Methods whose packages are missing are skipped
with a message; spacy (for datatrove), rensa and datasketch are not dependencies of this project. Writes a record.
"""

import argparse
import gzip
import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
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
PACKAGES = {"datatrove": ("datatrove", "spacy"), "rensa": ("rensa",), "datasketch": ("datasketch",)}


class Stopwatch:
    """Wall seconds of consecutive steps by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, step: str) -> None:
        """Add the time since the last lap to `step`."""
        now = time.perf_counter()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._last
        self._last = now


def ours(texts: list[str], watch: Stopwatch) -> int:
    """Run all our steps; returns the number of removed documents."""
    values, counts, hashes = [], [np.zeros(1, dtype=np.int64)], []
    for start in range(0, len(texts), BATCH):
        some, offsets = shingle_sets(texts[start : start + BATCH], NGRAM)
        watch.lap("shingles")
        hashes.append(band_hashes(some, offsets, BANDS, ROWS))
        watch.lap("signatures")
        values.append(some)
        counts.append(np.diff(offsets))
    pairs = np.concatenate([candidate_pairs(band)[0] for band in np.concatenate(hashes).T])
    pairs = np.unique(pairs, axis=0)
    watch.lap("candidates")
    jaccard = exact_jaccard(np.concatenate(values), np.cumsum(np.concatenate(counts)), pairs)
    watch.lap("exact_check")
    pairs, jaccard = pairs[jaccard >= THRESHOLD], jaccard[jaccard >= THRESHOLD]
    labels = clusters(len(texts), pairs)
    keep = choose_survivors(labels, np.array([len(text) for text in texts]))
    causes(labels, keep, pairs, jaccard)
    watch.lap("clusters")
    return int((~keep).sum())


def datatrove(texts: list[str]) -> int:
    """Run datatrove's three stages with their defaults, without its executor; returns removed documents."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupSignature,
    )
    from loguru import logger

    logger.remove()
    config = MinhashConfig()
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        signatures, buckets, removed = (f"{folder}/{name}" for name in ("signatures", "buckets", "removed"))
        MinhashDedupSignature(signatures, config).run(iter(documents))
        for rank in range(config.num_buckets):
            MinhashDedupBuckets(signatures, buckets, config=config).run(None, rank, config.num_buckets)
        MinhashDedupCluster(buckets, removed, config=config).run(None)
        return sum(file.stat().st_size // 4 for file in Path(removed).glob("*.remove"))


def plain_shingles(text: str) -> set[str]:
    """5-grams as strings, the input of the other libraries."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + NGRAM]) for i in range(max(len(words) - NGRAM + 1, 1))}


def rensa(texts: list[str]) -> int:
    """RMinHash in one call, our pairs of equal bands, exact check of sets; returns removed documents."""
    from rensa import RMinHash

    sets, pairs = [plain_shingles(text) for text in texts], set()
    rows = RMinHash.digests_from_token_sets([list(held) for held in sets], BANDS * ROWS, 1)
    for band in np.split(np.array(rows, dtype=np.uint32), BANDS, axis=1):
        _, numbers = np.unique(np.ascontiguousarray(band).view(f"V{4 * ROWS}").ravel(), return_inverse=True)
        pairs |= set(map(tuple, candidate_pairs(numbers.astype(np.uint64))[0].tolist()))
    return num_removed(sets, pairs)


def datasketch(texts: list[str]) -> int:
    """MinHash in batches, datasketch's LSH with our bands, exact check of sets; returns removed documents."""
    from datasketch import MinHash, MinHashLSH

    sets, pairs = [plain_shingles(text) for text in texts], set()
    lsh = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    encoded = ([shingle.encode() for shingle in held] for held in sets)
    for number, sketch in enumerate(MinHash.generator(encoded, num_perm=BANDS * ROWS, seed=1)):
        pairs |= {(other, number) for other in lsh.query(sketch)}
        lsh.insert(number, sketch, check_duplication=False)
    return num_removed(sets, pairs)


def num_removed(sets: list[set], pairs: set[tuple[int, int]]) -> int:
    """Count all but one document per cluster of similar pairs."""
    similar = [(i, j) for i, j in pairs if len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= THRESHOLD]
    labels = clusters(len(sets), np.array(similar, dtype=np.int64).reshape(-1, 2))
    return len(sets) - len(np.unique(labels))


def timed(function: Callable, *arguments) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and the result of the function."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function(*arguments)
    return time.perf_counter() - wall, time.process_time() - cpu, result


def compare(texts: list[str], rounds: int) -> dict[str, dict]:
    """Measure all methods in alternation on the same texts, after one warm-up round; megabytes of UTF-8."""
    paths: dict[str, Callable] = {"ours": lambda held: ours(held, Stopwatch())}
    for name, path in (("datatrove", datatrove), ("rensa", rensa), ("datasketch", datasketch)):
        missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{name}: skipped, {', '.join(missing)} not installed")
        else:
            paths[name] = path
    for path in paths.values():
        path(texts[:50])
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    rates: dict[str, list[float]] = {f"{name}/{kind}": [] for name in paths for kind in ("wall", "cpu")}
    removed, ratios = {}, {name: [] for name in paths if name != "ours"}
    for _ in range(rounds):
        for name, path in paths.items():
            wall, cpu, removed[name] = timed(path, texts)
            rates[f"{name}/wall"].append(megabytes / wall)
            rates[f"{name}/cpu"].append(megabytes / cpu)
        for name, held in ratios.items():  # CPU time: long runs are interrupted more often
            held.append(rates["ours/cpu"][-1] / rates[f"{name}/cpu"][-1])
    metrics = {}
    for name in paths:
        metrics |= spread(f"sample/{name}", rates[f"{name}/wall"], "MB/s")
        metrics[f"sample/{name}/cpu"] = {"value": statistics.median(rates[f"{name}/cpu"]), "unit": "MB/CPU s"}
        metrics[f"sample/{name}/removed"] = {"value": removed[name], "unit": "documents"}
    for name, held in ratios.items():
        metrics |= spread(f"sample/ours_over_{name}", held, "x in CPU time, same round")
    return metrics


def spread(name: str, values: list[float], unit: str) -> dict[str, dict]:
    """Median, minimum and maximum over the rounds."""
    found = {"": statistics.median(values), "/lowest": min(values), "/highest": max(values)}
    return {name + ending: {"value": value, "unit": unit} for ending, value in found.items()}


def whole(train: list[str], dev: list[str], rounds: int) -> dict[str, dict]:
    """Measure ours on all passages by step, the search for evaluation text, and near-duplicates of dev in train."""
    megabytes = sum(len(text.encode()) for text in train) / 1e6
    rates, cpu_rates, documents, overlap, steps = [], [], [], [], {}
    for _ in range(rounds):
        watch = Stopwatch()
        wall, cpu, removed = timed(ours, train, watch)
        rates.append(megabytes / wall)
        cpu_rates.append(megabytes / cpu)
        documents.append(len(train) / wall)
        for step, seconds in watch.seconds.items():
            steps.setdefault(step, []).append(seconds)
        wall, _, found = timed(contaminated, train, dev)
        overlap.append(megabytes / wall)
    metrics = spread("whole/ours", rates, "MB/s") | spread("whole/ours_documents", documents, "documents/s")
    metrics["whole/ours/cpu"] = {"value": statistics.median(cpu_rates), "unit": "MB/CPU s"}
    metrics["whole/removed"] = {"value": removed, "unit": "documents"}
    for step, seconds in steps.items():
        metrics[f"whole/{step}"] = {"value": statistics.median(seconds), "unit": "s"}
    metrics |= spread("whole/evaluation_text", overlap, "MB/s")
    metrics["whole/evaluation_text/documents"] = {"value": found, "unit": "train passages with dev text"}
    metrics["whole/dev_in_train"] = {"value": num_leaked(train, dev), "unit": "pairs at Jaccard 0.7"}
    return metrics


def contaminated(train: list[str], dev: list[str]) -> int:
    """Count train passages that contain half of the 8-grams of a dev passage, including the index's construction."""
    index, found = EvaluationIndex({"dev": dev}, 8), 0
    for start in range(0, len(train), BATCH):
        documents, _, _ = index.contaminates(*word_ngrams(train[start : start + BATCH], 8), 0.5)
        found += len(np.unique(documents))
    return found


def num_leaked(train: list[str], dev: list[str]) -> int:
    """Count near-duplicate pairs of a dev and a train passage."""
    values, offsets = shingle_sets(dev + train, NGRAM)
    bands = band_hashes(values, offsets, BANDS, ROWS).T
    pairs = np.unique(np.concatenate([candidate_pairs(band)[0] for band in bands]), axis=0)
    pairs = pairs[(pairs[:, 0] < len(dev)) & (pairs[:, 1] >= len(dev))]
    return int((exact_jaccard(values, offsets, pairs) >= THRESHOLD).sum())


def read_articles(path: Path) -> list[str]:
    """Read the passages of a RACE file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["article"] for line in file]


def main() -> int:
    """Measure, print the results and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--race", type=Path, required=True, help="folder of race_train.jsonl.gz and race_dev.jsonl.gz")
    parser.add_argument(
        "--sample", type=int, default=2000, help="number of passages in the comparison (the first ones)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--record", type=record_argument, default=None, help="default: outputs/dedup_cost/<time>/record.json"
    )
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    train, dev = (read_articles(options.race / f"race_{split}.jsonl.gz") for split in ("train", "dev"))
    sample = train[: options.sample]
    metrics = compare(sample, options.rounds) | whole(train, dev, options.rounds)
    config = {
        "corpus": "RACE",
        "sample_documents": len(sample),
        "documents": len(train),
        "ngram": NGRAM,
        "bands": BANDS,
        "rows": ROWS,
        "jaccard": THRESHOLD,
        "rounds": options.rounds,
        "versions": {
            package: version(package)
            for packages in PACKAGES.values()
            for package in packages
            if importlib.util.find_spec(package)
        },
    }
    layout = {"threads": 1}
    record = new_record("dedup_cost", "run", config=config, seed=1234, metrics=metrics, device="cpu", layout=layout)
    path = options.record or ROOT / "outputs" / "dedup_cost" / time.strftime("%Y-%m-%d_%H-%M-%S") / "record.json"
    write_record(record, path)
    print(json.dumps({name: entry["value"] for name, entry in metrics.items()}, indent=1))
    print(f"record: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
