"""At every layout, losses, gradients, norm and weights equal those of one process (fp64, 1e-12)."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from runs import assert_equal_runs, read_rows, read_tensors, run_jobs, tiny_run

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))  # (tp_size, dp_size)
BOUND = 1e-12
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
CASES["gpt-pre-selective"] = ("gpt", {"model__recompute": "selective"})
CASES["bert-post-selective"] = ("bert", {"model__norm_order": "post", "model__recompute": "selective"})
CASES["gpt-pre-zero1"] = ("gpt", {"parallel__zero1": True, "micro_batch_size": 1})
CASES["bert-post-zero1"] = ("bert", {"parallel__zero1": True, "model__norm_order": "post"})
# Dropout masks are independent of the layout: always for hidden dropout, for attention dropout with exact attention.
CASES["gpt-pre-dropout"] = (
    "gpt",
    {"model__hidden_dropout": 0.2, "model__attention_dropout": 0.2, "model__attention": "exact"},
)
CASES["bert-post-dropout"] = (
    "bert",
    {
        "model__norm_order": "post",
        "model__hidden_dropout": 0.2,
        "model__attention_dropout": 0.2,
        "model__attention": "exact",
        "micro_batch_size": 2,
    },
)
MUP = {"model__parametrization": "mup", "model__base_hidden_size": 6, "model__base_head_size": 3}
COMPLETEP = MUP | {"model__parametrization": "completep", "model__base_num_layers": 1}
SCALED = {
    f"{family}-{c['model__parametrization']}": (family, c) for family in ("gpt", "bert") for c in (MUP, COMPLETEP)
}
CASES |= SCALED
# Switches with one family and norm order; the other combinations are slow tests, and ZeRO-1 has tests of its own.
QUICK = {  # the layouts besides one process
    "gpt-pre-plain": ((4, 1),),
    "gpt-pre-accumulated": ((2, 2),),
    "gpt-pre-dropout": ((2, 1), (1, 2), (2, 2)),
    "bert-post-full-recompute": ((2, 1), (2, 2)),
    "bert-post-first-gradient": ((1, 2), (4, 1)),
    **dict.fromkeys(SCALED, ((2, 1), (4, 1))),
}


def train_all(cases: dict[str, Iterable[tuple[int, int]]], root: Path) -> Path:
    """Train every case on one process and at its layouts; the ranks are started once per world size."""
    for world_size in (1, 2, 4):
        runs = [
            tiny_run(architecture, root / name / f"{tp}x{dp}", parallel__tp_size=tp, parallel__dp_size=dp, **changes)
            for name, (architecture, changes) in ((name, CASES[name]) for name in cases)
            for tp, dp in ((1, 1), *cases[name])
            if tp * dp == world_size
        ]
        run_jobs(runs, world_size)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The quick cases, trained."""
    return train_all(QUICK, tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory) -> Path:
    """All cases at all layouts, trained."""
    return train_all(dict.fromkeys(CASES, LAYOUTS[1:]), tmp_path_factory.mktemp("slow_layouts"))


def folder_of(request: pytest.FixtureRequest, case: str, layout: tuple[int, int] = (1, 1)) -> Path:
    """The runs of a case, which are trained with the other quick ones or with the slow ones."""
    is_quick = case in QUICK and layout in ((1, 1), *QUICK[case])
    return request.getfixturevalue("folder" if is_quick else "slow_folder") / case


def relative(a: float, b: float) -> float:
    """|a - b| / |b|"""
    return abs(a - b) / abs(b)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=[pytest.mark.slow] * (layout not in QUICK.get(case, ())))
        for case, layout in itertools.product(CASES, LAYOUTS[1:])
    ],
)
def test_a_run_does_not_depend_on_the_layout(request, case, layout) -> None:
    folder = folder_of(request, case, layout)
    # After one step the first moment is 0.1 times the gradient.
    moments = 1.0 if "first-gradient" in case else 10.0
    assert_equal_runs(folder / "1x1", folder / f"{layout[0]}x{layout[1]}", BOUND, moments)


@pytest.mark.parametrize("architecture", ["gpt", pytest.param("bert", marks=pytest.mark.slow)])
def test_micro_batches_do_not_change_the_run(request, architecture) -> None:
    cases = (f"{architecture}-pre-{variant}" for variant in ("plain", "accumulated"))
    plain, accumulated = (read_rows(folder_of(request, case) / "1x1") for case in cases)
    for row, other in zip(plain, accumulated, strict=True):
        assert relative(other["train/loss"], row["train/loss"]) < BOUND
        assert relative(other["grad_norm"], row["grad_norm"]) < BOUND


def test_the_cases_give_different_runs(folder) -> None:
    """Equality over layouts means little if the switches have no effect."""
    cases = ("gpt-pre-plain", "gpt-pre-dropout", "bert-post-full-recompute")
    losses = {case: read_rows(folder / case / "1x1")[-1]["train/loss"] for case in cases}
    assert len({round(loss, 6) for loss in losses.values()}) == len(losses), losses


def test_every_parameter_is_updated(folder) -> None:
    tensors = read_tensors(folder / "bert-post-full-recompute" / "1x1")
    still = [key for key, tensor in tensors.items() if key.startswith("exp_avg/") and not torch.any(tensor)]
    assert still == []
