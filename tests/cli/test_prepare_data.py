"""`python src/prepare_data.py` from files to a binary dataset: its content, and that it depends on nothing else."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from entry_points import REPOSITORY, TINY, environment, train
from preparing import SMALL, digests, edited, manifest_of, passages, prepare, read_documents, write_lines

from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.corpus.collecting import document_key
from lmscale.corpus.tokenizing import split_of
from lmscale.data.indexed_dataset import IndexedDataset
from lmscale.data.prepare import prepare_corpus

FRENCH = (
    "Les élèves de cette école ont visité le musée de la ville avec leurs professeurs pendant toute la journée. " * 9
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, shared_data):
    """A folder of files with every case that a preparation handles, and the texts that must remain."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [text for text in passages(shared_data, 420) if len(text.split()) >= 130]
    plain, near, evaluation = texts[:-20], texts[0], texts[-1]
    quoted = next(text for text in plain if "'" in text)
    copies = [plain[3], plain[3], plain[5]]
    others = [
        edited(near, 0.02),
        FRENCH,
        "Too short to keep.",
        f"{texts[-2]}\n{evaluation}",
        quoted.replace("'", "â€™"),
    ]
    ids = [f"id{number}" for number in range(len(plain))]
    write_lines(folder / "one.jsonl", plain[:150], id=ids[:150])
    write_lines(folder / "two.jsonl.gz", plain[150:] + copies, id=ids[150:] + ["id0", "x", "y"])
    write_lines(folder / "three.jsonl", others)
    (folder / "test.jsonl").write_text("", encoding="utf-8")
    write_lines(folder.parent / "evaluation.jsonl", [evaluation, "short item"])
    return folder, plain


@pytest.fixture(scope="module")
def options(corpus):
    folder, _ = corpus
    return (
        f"sources.local.path={folder}",
        "evaluation=lambada",
        f"evaluation_sets.lambada.path={folder.parent / 'evaluation.jsonl'}",
        "tokenizer.vocab_size=600",
        "shard_mb=1",
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, options):
    """The dataset made by one worker."""
    output = tmp_path_factory.mktemp("prepared") / "data"
    done = prepare(*options, f"output={output}", "launcher.workers=1")
    assert done.returncode == 0, done.stderr
    return output, done.stdout


def test_every_step_is_applied_and_counted(prepared, corpus) -> None:
    output, said = prepared
    manifest, (_, plain) = manifest_of(output), corpus
    stages = manifest["stages"]
    counts = {label: value for steps in stages.values() for held in steps.values() for label, value in held.items()}
    # Three copies in two.jsonl.gz, and one with broken quotes after repair.
    assert counts["copies"] == 4 and counts["duplicate_ids"] == 1 and counts["contaminated"] == 1
    assert counts["other_language"] == 1 and counts["short"] >= 1 and counts["repaired"] >= 1
    assert manifest["reports"]["near_duplicates"] == manifest["reports"]["clusters"] == counts["removed"]
    assert counts["removed"] >= 1
    source = manifest["sources"]["local"]
    assert source["weight"] == source["train"]["tokens"]
    assert source["train"]["documents"] + source["validation"]["documents"] <= len(plain)
    for number in (source["train"]["documents"], source["train"]["tokens"]):
        assert f"{number:,}" in said


def test_the_expected_documents_remain_in_the_order_of_their_keys(prepared, corpus) -> None:
    output, _ = prepared
    _, plain = corpus
    duplicates = pq.read_table(output / "reports" / "duplicates.parquet").to_pylist()
    removed = {row["removed_key"] for row in duplicates}
    for split in ("train", "validation"):
        found = read_documents(output, split=split)
        keys = [document_key(text) for text in found]
        assert keys == sorted(keys)
        assert set(keys) == {k for k in map(document_key, plain) if split_of(k, 30) == split and k not in removed}
    assert {row["survivor_key"] for row in duplicates}.isdisjoint(removed)
    assert all(row["jaccard"] >= 0.7 for row in duplicates)


def test_reports_name_the_files_and_rows(prepared) -> None:
    output, _ = prepared
    copies = pq.read_table(output / "reports" / "copies.parquet").to_pylist()
    assert sorted((os.path.basename(row["file"]), row["row"]) for row in copies)
    contaminated = pq.read_table(output / "reports" / "contaminated.parquet").to_pylist()
    assert [(os.path.basename(row["file"]), row["item"]) for row in contaminated] == [("three.jsonl", "lambada/0")]
    leakage = manifest_of(output)["reports"]["leakage"]["lambada"]
    assert leakage["items"] == 2 and leakage["items_not_checkable"] == 1 and leakage["percent"] < 5


@pytest.mark.slow
def test_two_workers_and_shuffled_files_give_the_same_bytes(prepared, options, corpus, tmp_path) -> None:
    output, _ = prepared
    folder, _ = corpus
    shuffled = tmp_path / "shuffled"
    shutil.copytree(folder, shuffled)
    (shuffled / "one.jsonl").rename(shuffled / "zzz.jsonl")
    lines = (shuffled / "three.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (shuffled / "three.jsonl").write_text("".join(reversed(lines)), encoding="utf-8")
    other = tmp_path / "data"
    done = prepare(*options, f"output={other}", "launcher.workers=2", f"sources.local.path={shuffled}", "shard_mb=1000")
    assert done.returncode == 0, done.stderr
    mine, theirs = digests(output), digests(other)
    data = {name for name in mine if not name.startswith("reports")}
    assert {name: mine[name] for name in data} == {name: theirs[name] for name in data} and len(data) == 5


@pytest.mark.slow
def test_a_killed_and_repeated_command_gives_the_same_bytes(prepared, options, tmp_path) -> None:
    output, _ = prepared
    other = tmp_path / "data"
    command = [sys.executable, str(REPOSITORY / "src" / "prepare_data.py"), *options, f"output={other}"]
    killed = 0
    for stage in ("sort", "tokenize"):
        process = subprocess.Popen(command, env=environment(), start_new_session=True, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (other / ".work" / "logs" / stage).exists():
            time.sleep(0.02)
        killed += process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (other / "manifest.json").exists()
    assert killed == 2
    done = prepare(*options, f"output={other}", "launcher.workers=1")
    assert done.returncode == 0, done.stderr
    assert digests(other) == digests(output)


def test_a_model_trains_on_the_dataset(prepared, tmp_path) -> None:
    output, _ = prepared
    small = [o for o in TINY if not o.startswith("tokenizer")]
    done = train(*small, "data=indexed", f"data.path={output}", f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr


def test_bert_gets_sentences(options, tmp_path) -> None:
    output = tmp_path / "data"
    done = prepare(*options, "architecture=bert", f"output={output}", "launcher.workers=1")
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(output / "local_train_text_sentence")
    assert dataset.num_documents < len(dataset) and np.all(np.asarray(dataset.sizes) <= 128)
    config, tokenizer = DataConfig("indexed", 32, str(output), split="969,30,1"), TokenizerConfig("trained")
    assert prepare_corpus(config, tokenizer, "bert", None).manifest  # as a training reads it


def test_a_finished_or_unrelated_output_folder_is_refused(prepared, options, tmp_path) -> None:
    output, _ = prepared
    done = prepare(*options, f"output={output}")
    assert done.returncode == 2 and "has one (manifest.json)" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "mine.txt").write_text("notes")
    done = prepare(*options, f"output={tmp_path}")
    assert done.returncode == 2 and "`output` must be a new or empty folder" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "notes"


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [3, 50])
def test_one_line_of_many_megabytes_is_one_document(megabytes, shared_data, tmp_path) -> None:
    texts = passages(shared_data, 60)
    size = sum(map(len, texts))
    large = "\n".join(texts * (megabytes * 10**6 // size + 1))
    write_lines(tmp_path / "a.jsonl", [large, *texts])
    options = [*SMALL, f"sources.local.path={tmp_path / 'a.jsonl'}", f"output={tmp_path / 'out'}"]
    done = prepare(*options, "validation_every=3")
    assert done.returncode == 0, done.stderr
    found = read_documents(tmp_path / "out") + read_documents(tmp_path / "out", split="validation")
    assert large in found


def test_a_downloaded_corpus_of_the_paper_is_read_from_files(tmp_path) -> None:
    local = write_lines(tmp_path / "a.jsonl", [f"Line {n} is\ncut in its middle." for n in range(9)])
    given = ("corpus=cc_stories", "sources.cc_stories.kind=local", f"+sources.cc_stories.path={local}")
    done = prepare(*SMALL, *given, f"output={tmp_path / 'out'}", "cleaning=none", "dedup=none", "validation_every=2")
    assert done.returncode == 0, done.stderr
    assert "\nnote: `tokenizer.vocab_size` is 600, but the corpus has only 2" in done.stdout
    found = [read_documents(tmp_path / "out", "cc_stories", split) for split in ("train", "validation")]
    assert sorted(sum(found, [])) == [f"Line {n} is cut in its middle." for n in range(9)]


def test_documents_at_jaccard_0_8_are_duplicates_for_paper_but_not_for_megatron_v1(tmp_path) -> None:
    """Changing 9 of 400 words changes 45 of 396 shingles: (396 - 45) / (396 + 45)."""
    texts = [" ".join(f"{first}{number}" for number in range(400)) for first in ("a", "b", "c")]
    words = texts[0].split()
    words[20::40] = ["changed"] * len(words[20::40])
    write_lines(tmp_path / "in" / "one.jsonl", [*texts, " ".join(words[:380] + texts[0].split()[380:])])
    kept = {}
    for choice in ("paper", "megatron_v1"):
        output = tmp_path / choice
        given = (f"sources.local.path={tmp_path / 'in'}", f"output={output}", f"dedup={choice}")
        done = prepare(*SMALL, "cleaning=none", "validation_every=2", *given)
        assert done.returncode == 0, done.stderr
        kept[choice] = sum(len(read_documents(output, split=part)) for part in ("train", "validation"))
    assert kept == {"paper": 3, "megatron_v1": 4}
