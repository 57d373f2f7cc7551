"""`python src/prepare_data.py` with errors, bad files and full disks: one line, and the same command resumes."""

import re
import shutil

import pytest
from entry_points import REPOSITORY, refuse
from preparing import SMALL, digests, passages, prepare, write_lines

BAD = {
    "no such file": (["sources.local.path=/nowhere"], "can be read, but /nowhere: No such file"),
    "an unreadable file": (["sources.local.path=" + "x" * 300], "`sources.local.path` must be a file or a folder that"),
    "an unusable output": (["output=" + "x" * 300], "`output` must be a folder that can be made and written, but "),
    "weights of some": (["+sources.b={kind: local, path: x, weight: 2}"], "`sources.local.weight` must be given"),
    "a weight that is none": (["+sources.b={kind: local, path: x, weight: no}"], "`sources.b.weight` must be"),
    "books for gpt": (["corpus=bookscorpus"], "is for bert only"),
    "a number for a name": (
        ["+sources={2024: {kind: local, path: x}}"],
        "`sources` must have names of letters, digits, - and _, with quotes around a number, but has 2024",
    ),
    "a number for a set": (["+evaluation_sets={2024: {form: records, path: x}}"], "`evaluation_sets` must have names"),
    "partition": (["launcher=slurm"], "`launcher.partition` must be given"),
    "hub": (["corpus=wikipedia"], "wikimedia/wikipedia"),
    "evaluation file": (["evaluation=lambada", "evaluation_sets.lambada.path=/no.jsonl"], "/no.jsonl"),
    "evaluation hub": (["evaluation=wikitext103"], "evaluation=none keeps test sets in the corpus"),
    "tokenizer": (["tokenizer=bert"], "(gpt), but is bert; gpt2 and trained do"),
}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("cleaning.language", "`cleaning.language` must be a code of lid.176"),
        ("sources.local.text_field", "a.jsonl, row 1: must have a string `xx` (text_field)"),
        ("sources.b.text_field", "b.jsonl, row 1: must have a string `xx` (text_field)"),
    ],
)
def test_a_refused_value_does_not_bind_the_corrected_command(key, message, tmp_path) -> None:
    a, b = (write_lines(tmp_path / name, ["some text", "more text"]) for name in ("a.jsonl", "b.jsonl"))
    base = [*SMALL, f"sources.local.path={a}", f"+sources.b={{kind: local, path: {b}}}", f"output={tmp_path / 'out'}"]
    done = refuse(REPOSITORY / "src" / "prepare_data.py", *base, f"++{key}=xx")
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", BAD)
def test_an_error_is_one_line_and_exit_code_2(name, tmp_path) -> None:
    more, message = BAD[name]
    local = write_lines(tmp_path / "a.jsonl", ["some text"])
    given = {override.split("=")[0] for override in more}
    base = [f"sources.local.path={local}"] if not given & {"corpus", "sources.local.path"} else []
    base += [option for option in SMALL if "tokenizer" not in given or not option.startswith("tokenizer")]
    done = refuse(REPOSITORY / "src" / "prepare_data.py", *base, f"output={tmp_path / 'out'}", *more)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


BAD_CONTENT = {
    "invalid JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n', [], "a.jsonl, row 2: must be one JSON object per line"),
    "no text field": ("a.jsonl", b'{"words": "x"}\n', [], "`text`"),
    "truncated gzip": ("a.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc", [], "a.jsonl.gz"),
    "truncated zstd": ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04\x00", [], "a.jsonl.zst"),
    "corrupt parquet": ("a.parquet", b"PAR1 nothing", [], "a.parquet"),
    "only an empty file": ("a.jsonl", b"", [], "`sources` must hold text, but all 1 files are empty"),
    "only short documents": ("a.jsonl", b'{"text": "a few words"}\n{"text": "more"}\n', [], "drop short: short 2"),
    "one document": ("a.jsonl", b'{"text": "a"}\n{"text": " "}\n', [], "`sources` must hold at least 2 documents"),
    "nothing held out": (
        "a.jsonl",
        b'{"text": "a few words"}\n{"text": "more words"}\n',
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


# These have tests of their own in tests/corpus.
OF_A_STEP = ("invalid JSON", "no text field", "truncated gzip", "truncated zstd", "corrupt parquet")
OF_A_STEP += ("only an empty file", "one document", "duplicate ids")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in OF_A_STEP)) for name in BAD_CONTENT]
)
def test_bad_content_is_named_and_the_output_is_not_complete(name, tmp_path) -> None:
    file, content, more, message = BAD_CONTENT[name]
    (tmp_path / file).write_bytes(content)
    out = tmp_path / "out"
    done = prepare(*SMALL, f"sources.local.path={tmp_path / file}", f"output={out}", *more)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert not (out / "manifest.json").exists() and not list(out.glob("*.idx"))


def test_a_corpus_too_small_for_the_default_split_is_refused_with_one_that_holds_a_document_out(tmp_path) -> None:
    local = write_lines(tmp_path / "a.jsonl", [f"Document {n} is short. It has two sentences." for n in range(9)])
    options = [*SMALL, f"sources.local.path={local}", "cleaning=none", "dedup=none"]
    done = prepare(*options, f"output={tmp_path / 'out'}")
    assert done.returncode == 2 and "`validation_every` must hold out at least one document, but 30 " in done.stderr
    remedy = re.search(r"held out none; (validation_every=\d+ output=\S+) does", done.stderr)[1]
    done = prepare(*options, *remedy.split())
    assert done.returncode == 0 and "local validation: " in done.stdout, done.stderr


def test_a_corpus_that_cleaning_drops_is_refused_with_how_to_keep_it(tmp_path) -> None:
    texts = [f"Das ist der Satz Nummer {n}. Er ist kurz." for n in range(90)]
    options = [*SMALL, f"sources.local.path={write_lines(tmp_path / 'a.jsonl', texts)}", "dedup=none"]
    done = prepare(*options, f"output={tmp_path / 'out'}")
    assert done.returncode == 2 and "keep the language: other_language 90" in done.stderr
    remedy = re.search(r"; (cleaning=none output=\S+) keeps", done.stderr)[1]
    done = prepare(*options, *remedy.split())
    assert done.returncode == 0 and "local train: 88 documents" in done.stdout, done.stderr


def test_another_shard_mb_is_refused_when_a_preparation_continues(tmp_path) -> None:
    local = write_lines(tmp_path / "a.jsonl", ["many words " * 60_000, "more"])
    with open(local, "a") as file:
        file.write("no json\n" * 200_000)
    options = [*SMALL, f"sources.local.path={local}", f"output={tmp_path / 'out'}", "cleaning=none"]
    assert "must be one JSON object per line" in prepare(*options).stderr
    done = prepare(*options, "shard_mb=2")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "`shard_mb` is fixed for a started preparation, but 2 gives 2 shards" in done.stderr
    assert "was started with 3; if memory is short, raise `launcher.memory_gb`" in done.stderr
    assert "must be one JSON object per line" in prepare(*options).stderr  # the first value continues


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


@pytest.mark.slow
def test_skipped_rows_are_reported_and_a_higher_limit_of_bad_rows_resumes(shared_data, tmp_path) -> None:
    folder = tmp_path / "in"
    write_lines(folder / "a.jsonl", passages(shared_data, 60))
    write_lines(folder / "b.jsonl", ["more text"])
    with open(folder / "b.jsonl", "a") as file:
        file.write("no json\n")
    (folder / "scan.pdf").write_text("x")
    options = [*SMALL, f"sources.local.path={folder}", f"output={tmp_path / 'out'}", "validation_every=4"]
    done = prepare(*options)
    assert done.returncode == 2 and "b.jsonl, row 2" in done.stderr
    assert "skipped: other types 1 (the first is scan.pdf)" in done.stdout
    done = prepare(*options, "max_bad_rows=1")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_files_that_change_between_two_attempts_are_detected(shared_data, tmp_path) -> None:
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
    done = prepare(*options)  # fails at the end, where nothing is held out, and keeps its intermediate files
    assert done.returncode == 2 and "must hold out at least one document" in done.stderr
    test_set.write_text(" = Title = \n\n Another article .\n")
    done = prepare(*options)
    assert done.returncode == 2 and "was started with other evaluation texts" in done.stderr
    test_set.write_text(" = Title = \n\n An article .\n")
    merges = (bpe / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    (bpe / "vocab.bpe").write_text("\n".join(merges[:-1]) + "\n", encoding="utf-8")
    done = prepare(*options)
    assert done.returncode == 2 and "was started with another tokenizer" in done.stderr


@pytest.mark.slow
def test_an_attempt_that_ended_between_the_two_files_of_a_part_resumes(shared_data, tmp_path) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_stops_it_in_one_line_and_the_same_command_resumes(workers, shared_data, tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", passages(shared_data, 200))
    options = [*SMALL[:-1], f"sources.local.path={tmp_path / 'a.jsonl'}", "dedup=none", f"launcher.workers={workers}"]
    options += ["shard_mb=1000"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    done = prepare(*options, f"output={stopped}", file_limit=50_000)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "File too large" in last
    assert not (stopped / "manifest.json").exists() and "Traceback" not in done.stderr
    assert not [path for path in stopped.rglob("*") if path.suffix in (".parquet", ".idx", ".bin")]
    for output in (whole, stopped):
        done = prepare(*options, f"output={output}")
        assert done.returncode == 0, done.stderr
    assert digests(whole) == digests(stopped)
