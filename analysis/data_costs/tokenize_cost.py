"""Measure the overhead of the tokenization stage of `src/prepare_data.py` over the bare tokenizer.

    python analysis/data_costs/tokenize_cost.py

Tokenizes real text (RACE passages from $LMSCALE_DATA or ../shared/data) in alternation with the stage, from its parquet
input to .bin and .idx files, and with the bare `tokenizers` library, which encodes the same sequences in batches and
discards the result. Uses GPT-2's and BERT's published vocabularies, on one core and on two (two tasks or two threads).
BERT's sequences are sentences: the stage splits documents, the bare library gets them already split; `documents` is the
bare library on whole documents. Prints medians and writes a record of CPU time, which depends less on other load, and
wall time.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARDS, ROUNDS, MEGABYTES = 2, 3, 40
CLOCKS = ("wall", "cpu")
WAYS = {"gpt": ("bare", "stage"), "bert": ("bare", "documents", "stage")}
VOCABULARIES = {"gpt": ("gpt2", "gpt2-bpe"), "bert": ("bert", "bert-uncased")}


def read_texts(data: Path) -> list[str]:
    """Read about MEGABYTES of distinct RACE passages."""
    texts, size = [], 0
    with gzip.open(data / "race" / "race_train.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["article"])
            size += len(texts[-1])
            if size > MEGABYTES * 1e6:
                return list(dict.fromkeys(texts))
    return list(dict.fromkeys(texts))


def lay_out(root: Path, texts: list[str], architecture: str, data: Path) -> None:
    """Create the work folder as the earlier stages leave it."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lmscale.config.data import TokenizerConfig
    from lmscale.corpus.collecting import SCHEMA, document_key, shard_of
    from lmscale.corpus.tokenizing import TOKENIZER
    from lmscale.corpus.work_folder import WorkFolder, save_array
    from lmscale.data.tokenizer import load_published_tokenizer

    folder = WorkFolder(root)
    kind, path = VOCABULARIES[architecture]
    tokenizer = load_published_tokenizer(TokenizerConfig(kind, path=str(data / path)), architecture)
    tokenizer.inner.save(str(folder.path(TOKENIZER)))
    rows = sorted((document_key(text), "race", "race_train", number, "", text) for number, text in enumerate(texts))
    for shard in range(SHARDS):
        held = [row for row in rows if shard_of(row[0], SHARDS) == shard]
        columns = dict(zip(SCHEMA.names, map(list, zip(*held, strict=True)), strict=True))
        path = folder.shard_file("sorted", shard, "parquet")
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns, schema=SCHEMA), path, compression="zstd", row_group_size=2048)
        save_array(folder.shard_file("lengths", shard), np.array([len(row[5]) for row in held]))


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds of this process, all threads."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    """Elapsed seconds on both clocks."""
    now = clocks()
    return now[0] - start[0], now[1] - start[1]


def tokenize_stage(root: Path, architecture: str, shards: list[int]) -> tuple[float, float]:
    """Wall and CPU seconds of the stage for `shards`."""
    from lmscale.corpus.tokenizing import TokenizeShard

    start = clocks()
    for shard in shards:
        TokenizeShard(root, SHARDS, architecture, 30, None, 8, 0.5).run(rank=shard, world_size=SHARDS)
    return since(start)


def tokenize_bare(root: Path, way: str, architecture: str, shards: list[int]) -> tuple[float, float]:
    """Wall and CPU seconds of the bare library for the sequences of `shards`, read and split beforehand."""
    import pyarrow.parquet as pq

    from lmscale.corpus.tokenizing import TABLE_ROWS, TOKENIZER
    from lmscale.corpus.work_folder import WorkFolder
    from lmscale.data.sentences import split_sentences
    from lmscale.data.tokenizer import read_tokenizer

    folder = WorkFolder(root)
    texts = [t for s in shards for t in pq.read_table(folder.shard_file("sorted", s, "parquet"))["text"].to_pylist()]
    rows = [texts[first : first + TABLE_ROWS] for first in range(0, len(texts), TABLE_ROWS)]
    if way == "bare" and architecture == "bert":
        rows = [[sentence for text in some for sentence in split_sentences(text)] for some in rows]
    inner = read_tokenizer(folder.path(TOKENIZER)).inner
    start = clocks()
    for some in rows:
        inner.encode_batch_fast(some, add_special_tokens=False)
    return since(start)


def measure(root: Path, architecture: str, way: str, cores: int) -> tuple[float, float]:
    """Wall and CPU seconds of one method on the whole text in fresh processes, with one task or thread per core."""
    tasks = [[0], [1]] if (way, cores) == ("stage", 2) else [[0, 1]]
    threads = str(1 if way == "stage" else cores)
    settings = os.environ | {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": str(threads != "1").lower()}
    command = [sys.executable, __file__, "--measure", way, architecture, str(root)]
    started = [
        subprocess.Popen([*command, *map(str, shards)], env=settings, stdout=subprocess.PIPE, text=True)
        for shards in tasks
    ]
    seconds = [[float(value) for value in process.communicate()[0].split()] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(1)
    return max(wall for wall, _ in seconds), sum(cpu for _, cpu in seconds)


def main() -> int:
    """Measure, print the medians and write the record."""
    if sys.argv[1:2] == ["--measure"]:
        way, architecture, root, *shards = sys.argv[2:]
        numbers = [int(shard) for shard in shards]
        if way == "stage":
            print(*tokenize_stage(Path(root), architecture, numbers))
        else:
            print(*tokenize_bare(Path(root), way, architecture, numbers))
        return 0
    from lmscale.results import new_record, record_argument, write_record

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, default=ROOT / "outputs" / "tokenize_cost.json")
    options = parser.parse_args()
    data = Path(os.environ.get("LMSCALE_DATA", ROOT.parent / "shared" / "data"))
    if not (data / "race").is_dir():
        print(f"error: no data at {data}; set LMSCALE_DATA", file=sys.stderr)
        return 2
    texts = read_texts(data)
    size_mb = sum(len(text.encode()) for text in texts) / 1e6
    metrics = {"text": {"value": size_mb, "unit": "MB"}}
    for architecture in VOCABULARIES:
        with tempfile.TemporaryDirectory() as name:
            lay_out(Path(name), texts, architecture, data)
            for cores in (1, 2):
                seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS[architecture]}
                for _ in range(ROUNDS):
                    for way in seconds:
                        seconds[way].append(measure(Path(name), architecture, way, cores))
                key = f"{architecture}/{cores}_cores"
                for clock, unit in enumerate(("MB/s", "MB/CPU s")):
                    medians = {w: statistics.median(found[clock] for found in f) for w, f in seconds.items()}
                    for way, median in medians.items():
                        metrics[f"{key}/{way}/{CLOCKS[clock]}"] = {"value": size_mb / median, "unit": unit}
                    for way in WAYS[architecture][:-1]:
                        ratio = {"value": medians[way] / medians["stage"], "unit": f"stage / {way}"}
                        metrics[f"{key}/ratio_to_{way}/{CLOCKS[clock]}"] = ratio
    config = {"rounds": ROUNDS, "tasks": SHARDS, "vocabularies": VOCABULARIES}
    record = new_record("tokenize_cost", "run", config=config, seed=None, metrics=metrics, device="cpu")
    write_record(record, options.record)
    print(json.dumps({name: round(entry["value"], 3) for name, entry in metrics.items()}, indent=1))
    print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
