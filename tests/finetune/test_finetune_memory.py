"""A finetuning that does not fit into the free memory of its GPU, or whose save does not fit its host, is refused."""

import dataclasses

import pytest
import torch
from finetune_runs import make_checkpoint, make_run

from lmscale.finetune import finetuning
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.memory import checkpoint_bytes, estimate_memory, usable_bytes
from lmscale.training import fit
from lmscale.training.runtime.device_memory import DeviceMemoryError
from lmscale.training.runtime.exit_codes import USER_ERROR
from lmscale.training.runtime.session import new_trainer, run_on_this_rank


def test_a_finetuning_needs_18_bytes_per_parameter_that_are_free(tmp_path, monkeypatch, capfd) -> None:
    run = make_run("mnli", tmp_path, make_checkpoint(tmp_path / "step_3.ckpt"), precision__dtype="bf16")
    job = dataclasses.replace(finetuning.prepare_job(run), accelerator="gpu")
    model = build_model(job.start.config, ParallelContext(), seed=None)
    needed = 18 * sum(param.numel() for param in model.parameters())

    def build(*_):
        raise DeviceMemoryError("the model is built")

    monkeypatch.setattr(finetuning, "FinetuneModule", build)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    features = job.training_features()
    for free, error in [(needed, "the model is built"), (needed - 1, "the memory a rank needs")]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2 * needed))
        trainer = new_trainer(dataclasses.replace(job, accelerator="cpu"), max_steps=1)
        run_one = run_on_this_rank(job, trainer, lambda session: finetuning.train(job, features, 3, session))
        assert run_one == USER_ERROR
        assert capfd.readouterr().err.startswith(f"error: {error}")


def test_a_finetuning_with_zero1_gathers_its_save_in_the_memory_of_its_host(tmp_path, monkeypatch) -> None:
    """One that saves nothing needs no copy."""
    changes = {"parallel__dp_size": 2, "parallel__zero1": True, "precision__dtype": "bf16"}
    run = make_run("mnli", tmp_path, make_checkpoint(tmp_path / "step_3.ckpt"), trainer__save=True, **changes)
    job = finetuning.prepare_job(run)
    work = fit.finetuning_workload(run, job.start.config, on_gpu=False)
    each = checkpoint_bytes(work, job.layout) + estimate_memory(work, job.layout).total - usable_bytes(0, on_gpu=False)
    monkeypatch.setattr(fit, "host_memory_available", lambda: 2 * each)
    finetuning.prepare_job(run)
    monkeypatch.setattr(fit, "host_memory_available", lambda: 2 * each - 2)
    with pytest.raises(ValueError, match="`parallel.zero1` must be false where the host"):
        finetuning.prepare_job(run)
    unsaved = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, save=False))
    finetuning.prepare_job(unsaved)
