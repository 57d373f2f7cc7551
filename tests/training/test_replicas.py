"""Replicated parameters stay equal on all tensor ranks, and both loss reductions match their definitions."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from runs import read_rows, run_jobs, tiny_run, train_here

from lmscale.training.step import optimizer


def _keep_own_gradients(rank: int) -> None:
    """Rank 0's copy would hide a dropout mask or a reduction that differs between the tensor ranks."""
    optimizer.sync_replicated_gradients = lambda parameters, context: None


@pytest.mark.parametrize(
    ("architecture", "norm_order", "dtype"),
    [pytest.param("gpt", "pre", "fp32", marks=pytest.mark.slow), ("bert", "post", "bf16")],
)
def test_replicated_parameters_are_bitwise_equal_after_8_steps_with_dropout(
    tmp_path, architecture, norm_order, dtype
) -> None:
    run = tiny_run(
        architecture,
        tmp_path,
        parallel__tp_size=2,
        trainer__max_steps=8,
        trainer__check_replicas_every_steps=1,  # test_faults.py tests that this check detects differences
        model__norm_order=norm_order,
        model__hidden_dropout=0.1,
        model__attention_dropout=0.1,
        precision__dtype=dtype,
    )
    run_jobs([run], 2, fault=_keep_own_gradients)  # fails unless the run succeeds


def _keep_gradients(rank: int, folder: Path) -> None:
    """Save the gradients of every step, as they are before the update."""
    reduce, steps = optimizer.MixedPrecisionAdamW.reduce_gradients, itertools.count(1)

    def reduce_and_save(self: optimizer.MixedPrecisionAdamW) -> None:
        reduce(self)
        gradients = {name: gradient.clone() for name, gradient in self.gradients().items()}
        torch.save(gradients, folder / f"rank_{rank}_step_{next(steps)}.pt")

    optimizer.MixedPrecisionAdamW.reduce_gradients = reduce_and_save


@pytest.mark.parametrize("dtype", ["fp64", "fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_gradients_of_two_data_ranks_are_bitwise_equal(tmp_path, dtype) -> None:
    sizes = {"parallel__dp_size": 2, "micro_batch_size": 2, "precision__dtype": dtype}
    run_jobs([tiny_run("gpt", tmp_path / "run", **sizes)], 2, fault=partial(_keep_gradients, folder=tmp_path))
    for step in (1, 2, 3):
        one, other = (torch.load(tmp_path / f"rank_{rank}_step_{step}.pt") for rank in (0, 1))
        assert len(one) == 28 and all(gradient.any() for gradient in one.values())
        assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())


def test_mean_of_means_depends_on_the_micro_batch_size_and_token_mean_does_not(tmp_path) -> None:
    """BERT sequences have different numbers of masked tokens, so upstream's reduction gives a different loss."""
    losses = {}
    for reduction in ("token_mean", "mean_of_means"):
        for size in (1, 4):
            folder = tmp_path / f"{reduction}{size}"
            settings = {"loss_reduction": reduction, "micro_batch_size": size, "trainer__max_steps": 2}
            run = tiny_run("bert", folder, data__short_seq_probability=0.9, **settings)
            train_here(run)
            losses[reduction, size] = read_rows(folder)[0]["train/loss"]
    assert losses["token_mean", 1] == pytest.approx(losses["token_mean", 4], rel=1e-12)
    assert abs(losses["mean_of_means", 1] / losses["mean_of_means", 4] - 1) > 1e-6
