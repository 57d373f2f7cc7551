"""A finetuning whose optimizer does not fit into the free memory of a GPU ends before its model is built."""

import dataclasses

import pytest
import torch
from finetune_runs import make_checkpoint, make_run

from lmscale.finetune import finetuning
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.training.runtime.exit_codes import USER_ERROR
from lmscale.training.runtime.session import new_trainer, run_on_this_rank


def test_a_finetuning_needs_18_bytes_per_parameter_that_are_free(tmp_path, monkeypatch, capfd) -> None:
    run = make_run("mnli", tmp_path, make_checkpoint(tmp_path / "step_3.ckpt"), precision__dtype="bf16")
    job = dataclasses.replace(finetuning.prepare_job(run), accelerator="gpu")
    model = build_model(job.start.config, ParallelContext(), seed=None)
    needed = 18 * sum(param.numel() for param in model.parameters())
    assert finetuning.state_bytes(run, job.start.config, job.layout) == needed
    monkeypatch.setattr(finetuning, "FinetuneModule", lambda *_: pytest.fail("the model is built"))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed - 1, 2 * needed))
    trainer = new_trainer(dataclasses.replace(job, accelerator="cpu"), max_steps=1)
    features = job.training_features()
    assert run_on_this_rank(job, trainer, lambda session: finetuning.train(job, features, 3, session)) == USER_ERROR
    assert capfd.readouterr().err.startswith("error: the memory a rank needs must be at most what is free on its GPU")
