"""Which checkpoints a finetuning starts from: reused heads and vocabularies."""

import json
from pathlib import Path

import pytest
from finetune_runs import make_checkpoint, make_run, run_here

from lmscale.finetune.finetuning import prepare_job
from lmscale.finetune.initial_checkpoint import load_tokenizer
from lmscale.finetune.run_folder import prepare_folder

COLUMNS = {"id": "id", "first": "question1", "second": "question2", "label": "is_duplicate"}


def test_a_head_is_not_reused_with_other_labels(tmp_path) -> None:
    task = {"task__name": "mine", "task__columns": COLUMNS}
    ckpt = make_checkpoint(tmp_path / "ckpt")
    trained = make_run("qqp", tmp_path, ckpt, trainer__save=True, task__labels=["0", "1"], **task)
    assert run_here(trained) == 0
    task |= {"run": "again", "trainer__num_epochs": 0}
    saved = Path(trained.run_dir)
    prepare_job(make_run("qqp", tmp_path, saved, task__labels=["0", "1"], **task))
    with pytest.raises(ValueError, match=r"`task.labels` must be \['0', '1'\], with which step_3.ckpt was finetuned"):
        prepare_job(make_run("qqp", tmp_path, saved, task__labels=["1", "0"], **task))


def test_a_pooler_that_an_import_has_drawn_is_not_a_trained_one(tmp_path) -> None:
    imported = make_checkpoint(tmp_path / "ckpt", initialized=("pooler.bias", "pooler.weight"))
    with pytest.raises(ValueError, match="must have a trained pooler .* new_pooler=true"):
        prepare_job(make_run("qqp", tmp_path, imported))
    prepare_job(make_run("qqp", tmp_path, imported, new_pooler=True))


@pytest.mark.parametrize("vocab_size, fits_alone", [(256, True), (250, False)])
def test_a_model_may_have_more_ids_than_its_own_tokenizer(tmp_path, vocab_size: int, fits_alone: bool) -> None:
    ckpt = make_checkpoint(tmp_path / "ckpt", vocab_size=vocab_size)
    prepare_job(make_run("qqp", tmp_path, ckpt))
    (ckpt / "tokenizer").rename(tmp_path / "foreign")
    run = make_run("qqp", tmp_path, ckpt, tokenizer__path=str(tmp_path / "foreign"))
    if fits_alone:
        prepare_job(run)
    else:
        with pytest.raises(ValueError, match=f"must be that of the checkpoint, whose model has {vocab_size} ids"):
            prepare_job(run)


def test_lengths_of_squad_that_do_not_fit_are_named_at_once(tmp_path) -> None:
    """Those of conf/finetune/task/squad_v1.yaml with a model of 48 positions, and after the first message is heeded."""
    ckpt = make_checkpoint(tmp_path / "ckpt")
    lengths = {"task__max_seq_length": 384, "task__doc_stride": 128, "task__max_query_length": 64}
    positions = r"`task.max_seq_length` must be at most the 48 positions of the checkpoint, but is 384"
    both = positions + r", and `task.max_query_length` \+ `task.doc_stride` at most 45, but is 192"
    with pytest.raises(ValueError, match=both):
        prepare_job(make_run("squad_v1", tmp_path, ckpt, **lengths))
    with pytest.raises(ValueError, match=positions + "$"):
        prepare_job(make_run("squad_v1", tmp_path, ckpt, task__max_seq_length=384))
    one_rule = r"`task.max_seq_length` must be at least `task.max_query_length` \+ `task.doc_stride` \+ 3 \(195\), "
    with pytest.raises(ValueError, match=one_rule + "or windows would leave tokens out, but is 48"):
        make_run("squad_v1", tmp_path, ckpt, **lengths | {"task__max_seq_length": 48})
    prepare_job(
        make_run(
            "squad_v1", tmp_path, ckpt, task__max_query_length=40, task__doc_stride=5, **{"task__max_seq_length": 48}
        )
    )


def test_a_model_with_fewer_ids_than_its_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="must be that of the checkpoint, whose model has 20 ids"):
        prepare_job(make_run("qqp", tmp_path, make_checkpoint(tmp_path / "ckpt", vocab_size=20)))


def test_settings_beside_a_vocabulary_come_along_into_the_run_folder(tmp_path) -> None:
    ckpt = make_checkpoint(tmp_path / "ckpt")
    vocab = load_tokenizer(ckpt / "tokenizer", "bert").inner.get_vocab()
    cased, uncased = tmp_path / "cased", tmp_path / "uncased"
    for folder in (cased, uncased):
        folder.mkdir()
        (folder / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)), encoding="utf-8")
    (cased / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    prepare_job(make_run("qqp", tmp_path, ckpt, tokenizer__path=str(uncased / "vocab.txt")))
    run = make_run("qqp", tmp_path, ckpt, tokenizer__path=str(cased / "vocab.txt"))
    with pytest.raises(ValueError, match="`tokenizer.path` must be that of the checkpoint"):
        prepare_job(run)
    (ckpt / "tokenizer").rename(tmp_path / "moved")
    job = prepare_job(run)
    assert prepare_folder(job, tmp_path / "run") is None
    kept = load_tokenizer(tmp_path / "run" / "checkpoints" / "tokenizer", "bert")
    assert kept.fingerprint == load_tokenizer(cased / "vocab.txt", "bert").fingerprint
    assert kept.encode_batch(["CAT"]) != load_tokenizer(uncased / "vocab.txt", "bert").encode_batch(["CAT"])
