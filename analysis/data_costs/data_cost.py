"""Measure the cost of sample indices for a large corpus and the throughput of the training loader.

    python analysis/data_costs/data_cost.py

Builds GPT's table of windows for three numbers of documents and 4.38 epochs (with random lengths and no tokens on disk)
and BERT's table of sentence pairs. Each runs in its own process, whose peak memory is recorded. Then iterates over the
training loader of both with one process and one thread. Prints the results and writes a record.
"""

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from lmscale.config import BatchConfig
from lmscale.config.data import DataConfig
from lmscale.data.bert_index import TargetLengths, write_pairs
from lmscale.data.datamodule import PretrainDataModule
from lmscale.data.gpt_index import GPTOrder, write_windows
from lmscale.data.indexed_corpus import identity_of
from lmscale.data.indexed_dataset import HEADER, MAGIC, VERSION, IndexedDataset
from lmscale.data.indexed_writer import IndexedWriter
from lmscale.data.prepared import CorpusPart, PreparedCorpus
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
VOCAB = {"gpt": 50_257, "bert": 30_522}
LOADER_TOKENS, ROUNDS = 100_000_000, 5
BATCHES = {"gpt": (8, 512, 40), "bert": (16, 256, 12)}  # micro-batch size, global batch size, steps


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


def write_tokens(folder: Path, architecture: str) -> PreparedCorpus:
    """Write a corpus of random ids with the length distribution of real documents and sentences."""
    generator = np.random.default_rng(SEED)
    mean = MEAN_TOKENS if architecture == "gpt" else 26
    num_sequences = LOADER_TOKENS // mean
    sizes = np.clip(generator.lognormal(np.log(mean) - 0.18, 0.6, num_sequences), 2, 100 * mean).astype(np.int64)
    if architecture == "bert":
        sizes = np.minimum(sizes, 128)
    counts = np.ones(num_sequences, dtype=np.int64)
    if architecture == "bert":
        counts = np.diff(np.arange(0, num_sequences + BERT_SENTENCES, BERT_SENTENCES).clip(max=num_sequences))
    prefix = folder / architecture
    writer = IndexedWriter(prefix, "uint16")
    writer.add_documents(generator.integers(1000, VOCAB[architecture], sizes.sum()), sizes, counts)
    writer.finish()
    dataset = IndexedDataset(prefix)
    parts = {
        split: (CorpusPart(str(prefix), first, last, identity_of(dataset)),)
        for split, first, last in (
            ("train", 0, dataset.num_documents - 50),
            ("validation", dataset.num_documents - 50, dataset.num_documents),
        )
    }
    special = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
    manifest = {"train": {"sha256": "measured"}, "tokenizer": "measured"}
    return _Corpus(
        str(folder), architecture, VOCAB[architecture], special, manifest, parts, str(folder / "indices"), True
    )


class _Corpus(PreparedCorpus):
    """A vocabulary in which one piece in five continues a word, about as in the published one."""

    def load_tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(is_continuation=np.arange(self.vocab_size) % 5 == 0)


def loader_rates(folder: Path, architecture: str) -> dict:
    """Tokens per second of the training loader alone, in several rounds."""
    torch.set_num_threads(1)
    micro, batch, num_steps = BATCHES[architecture]
    length = GPT_LENGTH if architecture == "gpt" else BERT_LENGTH
    rates = []
    corpus = write_tokens(folder, architecture)
    config = DataConfig("embedded", length)
    for number in range(ROUNDS + 1):  # the first round builds the index and loads the tokens into memory
        module = PretrainDataModule(corpus, config, BatchConfig(micro, batch, 1), SEED + number % 2, num_steps, 8)
        module.trainer = SimpleNamespace(strategy=SimpleNamespace(parallel=SimpleNamespace(dp_rank=0, dp_size=1)))
        started = time.perf_counter()
        tokens = sum(micro_batch["tokens"].numel() for step in module.step_loader() for micro_batch in step)
        rates.append(tokens / (time.perf_counter() - started))
    return {"rates": rates[1:]}


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
        for architecture in BATCHES:
            found = measured(loader_rates, folder, architecture)
            for figure, value in (("median", statistics.median), ("slowest", min), ("fastest", max)):
                metrics[f"{architecture}_loader/{figure}"] = {"value": value(found["rates"]), "unit": "tokens/s"}
        shutil.rmtree(folder / "indices")
    config = {"gpt_cases": GPT_CASES, "bert": [BERT_DOCUMENTS, BERT_SENTENCES], "batches": BATCHES, "rounds": ROUNDS}
    record = new_record("data_cost", "run", config=config, seed=SEED, metrics=metrics, device="cpu", started=started)
    write_record(record, options.record)
    print(json.dumps({name: entry["value"] for name, entry in metrics.items()}, indent=1))
    print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
