"""Memory of `src/prepare_data.py` is bounded by the bytes of the longest document, whichever way they are cut."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from entry_points import REPOSITORY, environment

from lmscale.corpus import collecting

WORDS = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an".split()


def article(num_bytes: int, seed: int) -> str:
    """One line of English words and numbers, so that no two are near-duplicates."""
    generator = random.Random(seed)
    words, size = [], 0
    while size < num_bytes:
        words.append(generator.choice(WORDS) if generator.random() < 0.9 else str(generator.randrange(10**6)))
        size += len(words[-1]) + 1
    return " ".join(words)


def peak_bytes(folder: Path, sizes: list[int]) -> int:
    """Largest resident memory of a preparation of one document for each size, in a process of its own."""
    folder.mkdir()
    with open(folder / "a.jsonl", "w") as file:
        for seed, size in enumerate(sizes):
            file.write(json.dumps({"text": article(size, seed)}) + "\n")
    command = [sys.executable, str(REPOSITORY / "src" / "prepare_data.py"), f"sources.local.path={folder / 'a.jsonl'}"]
    command += [f"output={folder / 'out'}", "evaluation=none", "launcher.workers=1", "validation_every=4"]
    command += ["tokenizer.vocab_size=600"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stdout=log, stderr=log)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident_peak(process.pid))
            time.sleep(0.01)
    assert process.returncode == 0, (folder / "log").read_text()
    return peak


def resident_peak(pid: int) -> int:
    """Largest resident memory so far, of the program alone: `wait4` counts that of the process that started it too."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except ProcessLookupError:  # it has just ended
        return 0
    return 1024 * max((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), default=0)


SHORT = [3000] * 40
CASES = {
    "a document of 8 MB": [*SHORT, 8_000_000],
    "16 documents of 1 MB": [*SHORT, *[1_000_000] * 16],
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*CASES.values()], ids=[*CASES])
def test_long_documents_cost_a_few_times_their_bytes(tmp_path, sizes) -> None:
    plain, peak = peak_bytes(tmp_path / "plain", SHORT), peak_bytes(tmp_path / "long", sizes)
    assert plain > 50e6  # it was measured
    print(f"{(peak - plain) / 1e6:.0f} MB above {plain / 1e6:.0f} MB")
    assert peak - plain < 450e6


def test_batches_and_row_groups_end_by_bytes_long_before_they_have_many_documents(tmp_path, monkeypatch) -> None:
    # The peaks above do not show it: 16 documents that are all held at once cost 46 MB more than two batches of them.
    monkeypatch.setattr(collecting, "BATCH_BYTES", 1000)
    texts = [article(size, seed) for seed, size in enumerate([300] * 20 + [5000] + [300] * 20)]
    table = pa.table({"text": texts})
    found = list(collecting.batches(table["text"]))
    assert [text for batch in found for text in batch] == texts
    collecting._write_groups(table, tmp_path / "shard")
    groups = pq.ParquetFile(tmp_path / "shard")
    found += [groups.read_row_group(n)["text"].to_pylist() for n in range(groups.num_row_groups)]
    assert pq.read_table(tmp_path / "shard")["text"].to_pylist() == texts
    for batch in found:
        assert sum(map(len, batch[:-1])) < 1000  # the last one, of any length, ends it
