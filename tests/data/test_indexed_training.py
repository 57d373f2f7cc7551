"""Training on indexed datasets: with train.py, at every layout, and resumed."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from corpora import write_dataset
from runs import assert_equal_runs, read_rows, run_jobs, tiny_run, train_here

from lmscale.data.embedded import embedded_documents
from lmscale.data.sentences import SentenceEncoder
from lmscale.data.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer

LEVEL = {"gpt": "document", "bert": "sentence"}
BOUND = 1e-12


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[str, Path]:
    """For each architecture a folder with a tokenizer and the datasets `a` and `b` of real text."""
    texts, found = embedded_documents()[0][:60], {}
    for architecture, level in LEVEL.items():
        folder = tmp_path_factory.mktemp(architecture)
        tokenizer = Tokenizer(train_tokenizer(texts, architecture, 600, "vocab_size"))
        tokenizer.inner.save(str(folder / "tokenizer.json"))
        for name, some in (("a", texts[::2]), ("b", texts[1::2])):
            write_dataset(folder / f"{name}_text_{level}", encoded(tokenizer, some, architecture))
        found[architecture] = folder
    return found


def encoded(tokenizer: Tokenizer, texts: list[str], architecture: str) -> list[list[list[int]]]:
    if architecture == "gpt":
        return [[[*ids, tokenizer.id_of(END_OF_TEXT)]] for ids in tokenizer.encode_batch(texts)]
    ids, sizes, counts, _ = SentenceEncoder(tokenizer).encode(texts)
    sentences = [part.tolist() for part in np.split(ids, np.cumsum(sizes)[:-1])]
    ends = np.cumsum(counts)
    return [sentences[end - count : end] for end, count in zip(ends, counts, strict=True)]


def run_of(architecture: str, datasets: dict[str, Path], run_dir: Path, **changes):
    """A run on a blend of both datasets."""
    prefix = str(datasets[architecture] / "{}_text_") + LEVEL[architecture]
    data = {
        "kind": "indexed",
        "seq_length": 33,
        "path": {prefix.format("a"): 1.0, prefix.format("b"): 2.5},
        "split": "8,2,0",
        "cache_dir": str(run_dir.parent / "cache"),
    }
    return tiny_run(architecture, run_dir, data=data, tokenizer={"kind": "trained"}, **changes)


@pytest.fixture(scope="module")
def folder(datasets, tmp_path_factory) -> Path:
    """Each architecture at two or three layouts, and as `parts`, started in one process and resumed in two."""
    root = tmp_path_factory.mktemp("layouts")
    settings = {"trainer__max_steps": 4, "trainer__validate_every_steps": 2, "micro_batch_size": 2}
    on_two = []
    for name in LEVEL:
        parts = settings | {"resume": "auto"}
        stopped = run_of(name, datasets, root / name / "parts", trainer__stop_after_steps=2, **parts)
        for run in (run_of(name, datasets, root / name / "1x1", **settings), stopped):
            assert train_here(run) == 0
        on_two += [
            *([run_of(name, datasets, root / name / "2x1", parallel__tp_size=2, **settings)] if name == "bert" else []),
            run_of(name, datasets, root / name / "1x2", parallel__dp_size=2, **settings),
            run_of(name, datasets, root / name / "parts", parallel__dp_size=2, **parts),
        ]
    run_jobs(on_two, 2)
    return root


@pytest.mark.parametrize(
    ("architecture", "other"), [("bert", "2x1"), *itertools.product(("gpt", "bert"), ("1x2", "parts"))]
)
def test_a_blended_run_does_not_depend_on_the_layout_and_resumes_at_another(folder, architecture, other) -> None:
    plain = folder / architecture / "1x1"
    assert len(read_rows(plain)) == 4
    assert_equal_runs(plain, folder / architecture / other, moments=100.0)
