"""At every layout, losses, gradients, norm and weights equal those of one process (fp64, 1e-12), or it is refused."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from runs import DROPOUT, MUP, ONE, SEQUENCE, assert_equal_runs, read_rows, read_tensors, run_layouts, tiny_run

from lmscale.config import Layout
from lmscale.config.zero_shot import LambadaConfig, ZeroShotConfig
from lmscale.parallel import ParallelContext

LAYOUTS = ((2, 1, 1), (1, 1, 2), (2, 1, 2), (4, 1, 1))  # tensor, pipeline, data
GRID = (2, 1, 2)
BOUND = 1e-12
POST = {"model__norm_order": "post"}
COMPLETEP = MUP | {"model__parametrization": "completep", "model__base_num_layers": 1}
SCALED = {
    f"{family}-{c['model__parametrization']}": (family, c) for family in ("gpt", "bert") for c in (MUP, COMPLETEP)
}

CASES = {
    f"{architecture}-{norm_order}-{variant}": (architecture, {"model__norm_order": norm_order} | changes)
    for architecture, norm_order in itertools.product(("gpt", "bert"), ("pre", "post"))
    for variant, changes in {
        "plain": {"micro_batch_size": 4},
        "accumulated": {"micro_batch_size": 1},
        "full-recompute": {"model__recompute": "full", "micro_batch_size": 2},
        "first-gradient": {"trainer__max_steps": 1, "optimizer__max_grad_norm": None},
    }.items()
}
CASES |= SCALED | {
    "gpt-pre-selective": ("gpt", {"model__recompute": "selective"}),
    "bert-post-selective": ("bert", POST | {"model__recompute": "selective"}),
    "gpt-pre-zero1": ("gpt", {"parallel__zero1": True, "micro_batch_size": 1}),
    "bert-post-zero1": ("bert", POST | {"parallel__zero1": True}),
    "gpt-pre-dropout": ("gpt", DROPOUT),
    "bert-post-dropout": ("bert", DROPOUT | POST | {"micro_batch_size": 2}),
    "bert-means": ("bert", {"loss_reduction": "mean_of_means", "micro_batch_size": 2}),
    "gpt-sequence": ("gpt", SEQUENCE | DROPOUT | {"micro_batch_size": 2}),
    "gpt-sequence-post-full": ("gpt", SEQUENCE | POST | {"model__recompute": "full"}),
    "bert-sequence-selective": ("bert", SEQUENCE | {"model__recompute": "selective"}),
    "gpt-sequence-halves": ("gpt", SEQUENCE | DROPOUT | {"parallel__batch_halves": True}),
    "bert-sequence-zero1": (
        "bert",
        SEQUENCE | DROPOUT | POST | {"parallel__zero1": True, "micro_batch_size": 2, "logger__layer_grad_norms": True},
    ),
}
# Switches with one family and norm order; the other combinations are slow tests, and ZeRO-1 has tests of its own.
QUICK = {  # the layouts besides one process
    "gpt-pre-plain": ((4, 1, 1),),
    "gpt-pre-accumulated": (GRID,),
    "gpt-pre-dropout": (GRID,),
    "bert-post-full-recompute": (GRID,),
    "bert-post-first-gradient": ((1, 1, 2), (4, 1, 1)),
    "bert-means": ((1, 1, 2),),
    **dict.fromkeys(SCALED, ((4, 1, 1),)),
    **dict.fromkeys((name for name in CASES if "sequence" in name), (GRID,)),
}


def train_all(cases: dict[str, Iterable[tuple[int, int, int]]], root: Path) -> Path:
    """Train every case in one process and at its layouts."""
    run_layouts((CASES[name][0], root / name, CASES[name][1], layouts) for name, layouts in cases.items())
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The quick cases, trained."""
    return train_all(QUICK, tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory) -> Path:
    """All cases at all layouts, trained."""
    return train_all(dict.fromkeys(CASES, LAYOUTS), tmp_path_factory.mktemp("slow_layouts"))


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=[pytest.mark.slow] * (layout not in QUICK.get(case, ())))
        for case, layout in itertools.product(CASES, LAYOUTS)
    ],
)
def test_a_run_does_not_depend_on_the_layout(request, case, layout) -> None:
    folder = request.getfixturevalue("folder" if layout in QUICK.get(case, ()) else "slow_folder") / case
    # After one step the first moment is 0.1 times the gradient.
    moments = 1.0 if "first-gradient" in case else 10.0
    assert_equal_runs(folder / ONE, folder / "{}x{}x{}".format(*layout), BOUND, moments)


def test_micro_batches_do_not_change_the_run(folder) -> None:
    plain, accumulated = (read_rows(folder / f"gpt-pre-{variant}" / ONE) for variant in ("plain", "accumulated"))
    for row, other in zip(plain, accumulated, strict=True):
        for column in ("train/loss", "grad_norm"):
            assert other[column] == pytest.approx(row[column], rel=BOUND)


def test_the_cases_give_different_runs(folder) -> None:
    """Equality over layouts means little if the switches have no effect."""
    cases = ("gpt-pre-plain", "gpt-pre-dropout", "bert-post-full-recompute")
    losses = {case: read_rows(folder / case / ONE)[-1]["train/loss"] for case in cases}
    assert len({round(loss, 6) for loss in losses.values()}) == len(losses), losses


def test_every_parameter_is_updated(folder) -> None:
    tensors = read_tensors(folder / "bert-post-full-recompute" / ONE)
    still = [key for key, tensor in tensors.items() if key.startswith("exp_avg/") and not torch.any(tensor)]
    assert still == []


def test_a_sequence_length_not_divisible_by_tp_size_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="`data.seq_length` must be a multiple of `parallel.tp_size` .2. with"):
        tiny_run("gpt", tmp_path, parallel__tp_size=2, parallel__sequence_parallel=True)


def test_a_micro_batch_without_equal_halves_is_refused(tmp_path) -> None:
    halves = {"micro_batch_size": 3, "global_batch_size": 6, "parallel__batch_halves": True}
    with pytest.raises(ValueError, match="`micro_batch_size` must be even with `parallel.batch_halves`, but is 3"):
        tiny_run("gpt", tmp_path, parallel__tp_size=2, **halves)
    tiny_run("gpt", tmp_path, parallel__tp_size=1, **halves)  # without effect


def test_halves_are_refused_for_an_evaluation(tmp_path) -> None:
    with pytest.raises(ValueError, match="`parallel.batch_halves` must be false for an evaluation, but is true"):
        ZeroShotConfig(str(tmp_path), LambadaConfig("lambada", "x"), "y", parallel=Layout(tp_size=2, batch_halves=True))


def test_an_odd_batch_is_computed_as_a_whole_and_an_even_one_in_halves() -> None:
    context = ParallelContext(batch_halves=True)
    assert [context.batch_parts(num_samples) for num_samples in range(1, 7)] == [1, 2, 1, 2, 1, 2]
