"""`python src/prepare_data.py` from files to a binary dataset: what comes out, and that nothing else decides it."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from door import REPOSITORY, TINY, environment, train
from preparing import SMALL, digests, edited, manifest_of, passages, prepare, read_documents, write_lines

from lmscale.corpus.collecting import document_key
from lmscale.corpus.tokenizing import split_of
from lmscale.data.indexed import IndexedDataset

FRENCH = (
    "Les élèves de cette école ont visité le musée de la ville avec leurs professeurs pendant toute la journée. " * 9
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, shared_data):
    """A folder of files with everything that a preparation must deal with, and the texts that must be left."""
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
    """The dataset as one worker makes it."""
    output = tmp_path_factory.mktemp("prepared") / "data"
    done = prepare(*options, f"output={output}", "launcher.workers=1")
    assert done.returncode == 0, done.stderr
    return output, done.stdout


def test_every_step_does_its_part_and_says_how_often(prepared, corpus) -> None:
    output, said = prepared
    manifest, (_, plain) = manifest_of(output), corpus
    stages = manifest["stages"]
    counts = {label: value for steps in stages.values() for held in steps.values() for label, value in held.items()}
    # Three copies in two.jsonl.gz, and the one with broken quotes, once it is repaired.
    assert counts["copies"] == 4 and counts["duplicate_ids"] == 1 and counts["contaminated"] == 1
    assert counts["other_language"] == 1 and counts["short"] >= 1 and counts["repaired"] >= 1
    assert manifest["reports"]["near_duplicates"] == manifest["reports"]["clusters"] == counts["removed"]
    assert counts["removed"] >= 1
    source = manifest["sources"]["local"]
    assert source["train"]["documents"] + source["validation"]["documents"] <= len(plain)
    for number in (source["train"]["documents"], source["train"]["tokens"]):
        assert f"{number:,}" in said


def test_the_documents_are_those_that_belong_there_in_the_order_of_their_keys(prepared, corpus) -> None:
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


def test_a_kill_in_the_middle_and_the_same_command_again_give_the_same_bytes(prepared, options, tmp_path) -> None:
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


def test_a_model_trains_on_it(prepared, tmp_path) -> None:
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
    small = [o for o in TINY if not o.startswith("tokenizer")]
    run = train(*small, "model=bert_tiny", "data=indexed", f"data.path={output}", f"hydra.run.dir={tmp_path}/run")
    assert run.returncode == 0, run.stderr


def test_a_finished_or_a_foreign_output_is_refused(prepared, options, tmp_path) -> None:
    output, _ = prepared
    done = prepare(*options, f"output={output}")
    assert done.returncode == 2 and "has one (manifest.json)" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "mine.txt").write_text("notes")
    done = prepare(*options, f"output={tmp_path}")
    assert done.returncode == 2 and "`output` must be a new or empty folder" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "notes"


BAD = {
    "no such file": (["sources.local.path=/nowhere"], "must exist, but /nowhere"),
    "weights of some": (["+sources.b={kind: local, path: x, weight: 2}"], "`sources.local.weight` must be given"),
    "books for gpt": (["corpus=bookscorpus"], "is for bert only"),
    "jaccard": (["dedup.jaccard=1.5"], "`dedup.jaccard` must be above 0 and at most 1, but is 1.5"),
    "unknown key": (["sources.local.pth=x"], "`sources.local.pth` is not a known key"),
    "partition": (["launcher=slurm"], "`launcher.partition` must be given"),
    "hub": (["corpus=wikipedia"], "wikimedia/wikipedia"),
    "evaluation file": (["evaluation=lambada", "evaluation_sets.lambada.path=/no.jsonl"], "/no.jsonl"),
    "evaluation hub": (["evaluation=wikitext103"], "evaluation=none leaves test sets in"),
    "tokenizer": (["tokenizer=bert"], "`tokenizer` must suit the model (gpt), but is bert"),
    "tokenizer size": (["tokenizer.vocab_size=100"], "`tokenizer.vocab_size` must be above 256"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_exit_code_2(name, tmp_path) -> None:
    more, message = BAD[name]
    local = write_lines(tmp_path / "a.jsonl", ["some text"])
    given = {override.split("=")[0] for override in more}
    base = [f"sources.local.path={local}"] if not given & {"corpus", "sources.local.path"} else []
    base += [option for option in SMALL if "tokenizer" not in given or not option.startswith("tokenizer")]
    done = prepare(*base, f"output={tmp_path / 'out'}", *more)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


BAD_CONTENT = {
    "invalid JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n', [], "a.jsonl, row 2: must be one JSON object a line"),
    "no text field": ("a.jsonl", b'{"words": "x"}\n', [], "`text`"),
    "truncated gzip": ("a.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc", [], "a.jsonl.gz"),
    "truncated zstd": ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04\x00", [], "a.jsonl.zst"),
    "corrupt parquet": ("a.parquet", b"PAR1 nothing", [], "a.parquet"),
    "only an empty file": ("a.jsonl", b"", [], "`sources` must hold text, but all 1 files are empty"),
    "only short documents": ("a.jsonl", b'{"text": "a few words"}\n', [], "drop short: short 1"),
    "nothing held out": (
        "a.jsonl",
        b'{"text": "a few words"}\n',
        ["cleaning=none", "validation_every=1000000"],
        "`validation_every` must hold out at least one document",
    ),
    "duplicate ids": (
        "a.jsonl",
        b'{"id": "same", "text": "one"}\n{"id": "same", "text": "two"}\n',
        ["cleaning=none", "duplicate_ids=refuse"],
        "'same'",
    ),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_bad_content_is_named_and_nothing_looks_complete(name, tmp_path) -> None:
    file, content, more, message = BAD_CONTENT[name]
    (tmp_path / file).write_bytes(content)
    out = tmp_path / "out"
    done = prepare(*SMALL, f"sources.local.path={tmp_path / file}", f"output={out}", *more)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert not (out / "manifest.json").exists() and not list(out.glob("*.idx"))


def test_bert_needs_documents_of_two_sentences(tmp_path) -> None:
    local = write_lines(tmp_path / "a.jsonl", [f"Only one sentence, number {n}" for n in range(300)])
    options = [*SMALL, f"sources.local.path={local}", f"output={tmp_path / 'out'}", "cleaning=none", "dedup=none"]
    done = prepare(*options, "architecture=bert")
    assert done.returncode == 2 and "must have documents of two sentences or more" in done.stderr


def test_an_output_inside_the_input_is_refused(tmp_path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", ["some text"])
    done = prepare(*SMALL, f"sources.local.path={tmp_path / 'in'}", f"output={tmp_path / 'in' / 'out'}")
    assert done.returncode == 2 and "`output` must be outside `sources.local.path`" in done.stderr
    assert not (tmp_path / "in" / "out").exists()


def test_what_is_passed_over_is_said_and_a_higher_limit_of_bad_rows_goes_on(shared_data, tmp_path) -> None:
    folder = tmp_path / "in"
    write_lines(folder / "a.jsonl", passages(shared_data, 60))
    write_lines(folder / "b.jsonl", ["more text"])
    with open(folder / "b.jsonl", "a") as file:
        file.write("no json\n")
    (folder / "scan.pdf").write_text("x")
    options = [*SMALL, f"sources.local.path={folder}", f"output={tmp_path / 'out'}", "validation_every=4"]
    done = prepare(*options)
    assert done.returncode == 2 and "b.jsonl, row 2" in done.stderr
    assert "1 files of other kinds or linked folders are passed over" in done.stdout and "scan.pdf" in done.stdout
    done = prepare(*options, "max_bad_rows=1")
    assert done.returncode == 0, done.stderr


def test_files_that_change_between_two_attempts_are_noticed(shared_data, tmp_path) -> None:
    local = write_lines(tmp_path / "a.jsonl", passages(shared_data, 40))
    test_set = tmp_path / "test.tokens"
    bpe = shutil.copytree(shared_data / "gpt2-bpe", tmp_path / "bpe")
    options = ["shard_mb=1", "launcher.workers=1", f"sources.local.path={local}", f"output={tmp_path / 'out'}"]
    options += ["tokenizer=gpt2", f"tokenizer.path={bpe}", "evaluation=wikitext103"]
    options += [f"evaluation_sets.wikitext103.path={test_set}", "validation_every=1000000"]
    test_set.write_text("An article without its heading .\n")
    done = prepare(*options)
    assert done.returncode == 2 and "begin with a line ` = Title = `" in done.stderr
    test_set.write_text(" = Title = \n\n An article .\n")
    done = prepare(*options)  # gets to the end, where nothing is held out, and leaves its work
    assert done.returncode == 2 and "must hold out at least one document" in done.stderr
    test_set.write_text(" = Title = \n\n Another article .\n")
    done = prepare(*options)
    assert done.returncode == 2 and "was begun with other evaluation texts" in done.stderr
    test_set.write_text(" = Title = \n\n An article .\n")
    merges = (bpe / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    (bpe / "vocab.bpe").write_text("\n".join(merges[:-1]) + "\n", encoding="utf-8")
    done = prepare(*options)
    assert done.returncode == 2 and "was begun with another tokenizer" in done.stderr


def test_an_attempt_that_ended_between_the_two_files_of_a_part_goes_on(shared_data, tmp_path) -> None:
    local = write_lines(tmp_path / "a.jsonl", passages(shared_data, 60))
    given = ["sources.local.path", "output", "validation_every"]
    out = tmp_path / "out"
    options = [*SMALL, *(f"{k}={v}" for k, v in zip(given, (local, out, 4), strict=True)), "keep_work=true"]
    assert prepare(*options).returncode == 0
    whole = digests(out)
    (out / "manifest.json").unlink()
    joined = out / ".work" / "joined"
    joined.mkdir(exist_ok=True)
    (out / "local_train_text_document.idx").rename(joined / "local_train_text_document.idx")
    shutil.rmtree(out / ".work" / "logs" / "finish")
    done = prepare(*options)
    assert done.returncode == 0, done.stderr
    assert digests(out) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_stops_it_in_one_line_and_the_same_command_goes_on(workers, shared_data, tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", passages(shared_data, 200))
    options = [*SMALL[:-1], f"sources.local.path={tmp_path / 'a.jsonl'}", "dedup=none", f"launcher.workers={workers}"]
    options += ["shard_mb=1000"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "src" / "prepare_data.py"), *options, f"output={stopped}"],
        env=environment(),
        capture_output=True,
        text=True,
        # The kernel refuses files above this size, as it does on a full disk.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
        timeout=200,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "File too large" in last
    assert not (stopped / "manifest.json").exists() and "Traceback" not in done.stderr
    assert not [path for path in stopped.rglob("*") if path.suffix in (".parquet", ".idx", ".bin")]
    for output in (whole, stopped):
        done = prepare(*options, f"output={output}")
        assert done.returncode == 0, done.stderr
    assert digests(whole) == digests(stopped)


@pytest.mark.parametrize("megabytes", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_one_line_of_many_megabytes_is_a_document_like_any_other(megabytes, shared_data, tmp_path) -> None:
    texts = passages(shared_data, 60)
    size = sum(map(len, texts))
    large = "\n".join(texts * (megabytes * 10**6 // size + 1))
    write_lines(tmp_path / "a.jsonl", [large, *texts])
    options = [*SMALL, f"sources.local.path={tmp_path / 'a.jsonl'}", f"output={tmp_path / 'out'}"]
    done = prepare(*options, "validation_every=3")
    assert done.returncode == 0, done.stderr
    found = read_documents(tmp_path / "out") + read_documents(tmp_path / "out", split="validation")
    assert large in found


def test_documents_at_jaccard_0_8_are_duplicates_to_the_paper_and_not_to_megatron_v1(tmp_path) -> None:
    """Nine of 400 words changed are 45 of 396 shingles: (396 - 45) / (396 + 45)."""
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
