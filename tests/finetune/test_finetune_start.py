"""What a finetuning starts from: a checkpoint's head and vocabulary, and memory, without which it is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from finetune_runs import make_checkpoint, make_run, run_here

from lmscale.data.tokenizer import load_tokenizer_at
from lmscale.finetune import finetuning
from lmscale.finetune.preparing import prepare_job
from lmscale.finetune.run_folder import prepare_folder
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.memory import checkpoint_bytes, estimate_memory, usable_bytes
from lmscale.runtime.exit_codes import USER_ERROR
from lmscale.runtime.ranks import AgreedError
from lmscale.training import capacity
from lmscale.training.session import new_trainer, run_on_this_rank

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
    vocab = load_tokenizer_at(ckpt / "tokenizer", "bert").inner.get_vocab()
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
    prepare_folder(job, tmp_path / "run")
    kept = load_tokenizer_at(tmp_path / "run" / "checkpoints" / "tokenizer", "bert")
    assert kept.fingerprint == load_tokenizer_at(cased / "vocab.txt", "bert").fingerprint
    assert kept.encode_batch(["CAT"]) != load_tokenizer_at(uncased / "vocab.txt", "bert").encode_batch(["CAT"])


def test_a_finetuning_needs_18_bytes_per_parameter_that_are_free(tmp_path, monkeypatch, capfd) -> None:
    run = make_run("mnli", tmp_path, make_checkpoint(tmp_path / "step_3.ckpt"), precision__dtype="bf16")
    job = dataclasses.replace(prepare_job(run), accelerator="gpu")
    model = build_model(job.start.config, ParallelContext(), seed=None)
    needed = 18 * sum(param.numel() for param in model.parameters())

    def build(*_):
        raise AgreedError("the model is built")

    monkeypatch.setattr(finetuning, "FinetuneModule", build)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    features = job.training_features()
    for free, error in [(needed, "the model is built"), (needed - 1, "the memory a rank needs")]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2 * needed))
        trainer = new_trainer(job.run, job.layout, "cpu", max_steps=1)
        run_one = run_on_this_rank(job.run, trainer, lambda session: finetuning.train(job, features, 3, session))
        assert run_one == USER_ERROR
        assert capfd.readouterr().err.startswith(f"error: {error}")


def test_a_finetuning_with_zero1_gathers_its_save_in_the_memory_of_its_host(tmp_path, monkeypatch) -> None:
    """One that saves nothing needs no copy."""
    changes = {"parallel__dp_size": 2, "parallel__zero1": True, "precision__dtype": "bf16"}
    run = make_run("mnli", tmp_path, make_checkpoint(tmp_path / "step_3.ckpt"), trainer__save=True, **changes)
    job = prepare_job(run)
    work = capacity.finetuning_workload(run, job.start.config, on_gpu=False)
    each = checkpoint_bytes(work, job.layout) + estimate_memory(work, job.layout).total - usable_bytes(0, on_gpu=False)
    monkeypatch.setattr(capacity, "host_memory_available", lambda: 2 * each)
    prepare_job(run)
    monkeypatch.setattr(capacity, "host_memory_available", lambda: 2 * each - 2)
    with pytest.raises(ValueError, match="`parallel.zero1` must be false where the host"):
        prepare_job(run)
    unsaved = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, save=False))
    prepare_job(unsaved)
