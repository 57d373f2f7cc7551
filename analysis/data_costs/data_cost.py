"""Measure the cost of sample indices for a large corpus.

    python analysis/data_costs/data_cost.py

Builds GPT's table of windows for three numbers of documents and 4.38 epochs (with random lengths and no tokens on disk)
and BERT's table of sentence pairs. Each runs in its own process, whose peak memory is recorded. The committed record
also has the throughput of the training loader, from the script of its commit.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from lmscale.data.bert_index import TargetLengths, write_pairs
from lmscale.data.gpt_index import GPTOrder, write_windows
from lmscale.data.indexed_dataset import HEADER, MAGIC, VERSION, IndexedDataset
from lmscale.results import new_record, record_argument, write_record

ROOT = Path(__file__).resolve().parents[2]
MEAN_TOKENS = 897  # per document: the paper's corpus of 174 GB has about 36 G tokens in 40 M documents
GPT_CASES = {  # name: documents, epochs
    "10m_documents": (10_000_000, 1.0),
    "20m_documents": (20_000_000, 1.0),
    "40m_documents": (40_000_000, 1.0),
    "40m_documents_4.38_epochs": (40_000_000, 4.38),
}
BERT_DOCUMENTS, BERT_SENTENCES = 1_000_000, 40
GPT_LENGTH, BERT_LENGTH, SEED = 1024, 512, 1234


def measured(function, *arguments) -> dict:
    """Run `function` in a separate process; returns its result with the peak resident memory of the process."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_watched, (function, arguments))


def _watched(function, arguments: tuple) -> dict:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = function(*arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result | {"peak_memory": peak * 1024, "memory_before": before * 1024}


def draw_sizes(path: Path, num_documents: int) -> dict:
    """Write lognormal document lengths (int32) as in a dataset."""
    generator, sigma = np.random.default_rng(SEED), 1.0
    with open(path, "wb") as file:
        for start in range(0, num_documents, 1 << 20):
            count = min(1 << 20, num_documents - start)
            drawn = generator.lognormal(np.log(MEAN_TOKENS) - sigma**2 / 2, sigma, count)
            file.write(np.clip(drawn, 2, 2**20).astype(np.int32).data)
    return {}


def build_gpt(folder: Path, epochs: float) -> dict:
    """Build a table of windows; returns its time, its bytes and the tokens per epoch."""
    sizes = np.memmap(folder / "sizes", dtype=np.int32, mode="r")
    num_tokens = int(sizes.sum(dtype=np.int64))
    num_samples = int(epochs * ((num_tokens - 1) // GPT_LENGTH))
    order = GPTOrder("measured", len(sizes), num_tokens, GPT_LENGTH, SEED, num_samples)
    started = time.perf_counter()
    with open(folder / "windows.npy", "wb", buffering=1 << 20) as file:
        write_windows(file, order, sizes)
    seconds = time.perf_counter() - started
    size = (folder / "windows.npy").stat().st_size
    return {"time": seconds, "size": size, "tokens": num_tokens, "samples": order.num_windows}


def write_sentences(prefix: Path) -> dict:
    """Write a dataset of BERT's size with a sparse token file; only the index is read."""
    generator = np.random.default_rng(SEED)
    counts = generator.poisson(BERT_SENTENCES - 1, BERT_DOCUMENTS) + 1
    sizes = np.clip(generator.lognormal(3.1, 0.6, counts.sum()), 1, 128).astype(np.int32)
    ends = 2 * np.cumsum(sizes, dtype=np.int64)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, len(sizes), len(counts) + 1))
        for column in (sizes, np.concatenate([[0], ends[:-1]]), np.concatenate([[0], np.cumsum(counts)])):
            file.write(column.data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]))
    return {}


def build_bert(prefix: Path) -> dict:
    """Build the table of sentence pairs; returns its time and that of opening the dataset."""
    started = time.perf_counter()
    dataset = IndexedDataset(prefix)
    opened = time.perf_counter()
    lengths = TargetLengths(SEED, BERT_LENGTH - 3, 0.1)
    with open(f"{prefix}_pairs.npy", "wb", buffering=1 << 20) as file:
        write_pairs(file, dataset, 0, dataset.num_documents, lengths)
    rows = len(np.load(f"{prefix}_pairs.npy", mmap_mode="r"))
    return {"time": time.perf_counter() - opened, "open": opened - started, "samples": rows, "sentences": len(dataset)}


def main() -> int:
    """Measure, print the results and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, default=ROOT / "outputs" / "data_cost.json")
    options = parser.parse_args()
    started, metrics = time.time(), {}
    units = {"time": "s", "open": "s", "size": "bytes", "peak_memory": "bytes", "memory_before": "bytes"}
    with tempfile.TemporaryDirectory(prefix="lmscale_data_cost_") as name:
        folder = Path(name)
        for case, (num_documents, epochs) in GPT_CASES.items():
            measured(draw_sizes, folder / "sizes", num_documents)
            for figure, value in measured(build_gpt, folder, epochs).items():
                metrics[f"gpt_index/{case}/{figure}"] = {"value": value, "unit": units.get(figure, figure)}
        measured(write_sentences, folder / "sentences")
        for figure, value in measured(build_bert, folder / "sentences").items():
            metrics[f"bert_index/{figure}"] = {"value": value, "unit": units.get(figure, figure)}
    config = {"gpt_cases": GPT_CASES, "bert": [BERT_DOCUMENTS, BERT_SENTENCES]}
    record = new_record("data_cost", "run", config=config, seed=SEED, metrics=metrics, device="cpu", started=started)
    write_record(record, options.record)
    print(json.dumps({name: entry["value"] for name, entry in metrics.items()}, indent=1))
    print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
