"""Runs with sequence parallelism, also with micro-batches in halves, equal those of one process (fp64, 1e-12)."""

import pytest
from runs import assert_equal_runs, read_rows, run_jobs, tiny_run

from lmscale.config import Layout
from lmscale.config.zero_shot import LambadaConfig, ZeroShotConfig
from lmscale.parallel import ParallelContext

LAYOUTS = ((1, 1), (2, 2))  # (tp_size, dp_size)
BOUND = 1e-12
DROPPING = {"model__hidden_dropout": 0.2, "model__attention_dropout": 0.2, "model__attention": "exact"}
CASES = {
    "gpt-pre": ("gpt", {"micro_batch_size": 2, **DROPPING}),
    "gpt-post-full": ("gpt", {"model__norm_order": "post", "model__recompute": "full"}),
    "bert-pre-selective": ("bert", {"model__recompute": "selective"}),
    "gpt-pre-halves": ("gpt", {"micro_batch_size": 4, "parallel__batch_halves": True, **DROPPING}),
    "bert-post": ("bert", {"model__norm_order": "post", "micro_batch_size": 2, **DROPPING}),
}


def run_of(name: str, tp_size: int, dp_size: int, root, **more):
    architecture, changes = CASES[name]
    return tiny_run(
        architecture,
        root / name / f"{tp_size}x{dp_size}",
        data__seq_length=32,
        parallel__tp_size=tp_size,
        parallel__dp_size=dp_size,
        parallel__sequence_parallel=True,
        **changes,
        **more,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case at every layout."""
    root = tmp_path_factory.mktemp("sequence")
    for tp_size, dp_size in LAYOUTS:
        run_jobs([run_of(name, tp_size, dp_size, root) for name in CASES], tp_size * dp_size)
    return root


@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_weights_equal_those_of_one_process(folder, case: str) -> None:
    assert_equal_runs(folder / case / "1x1", folder / case / "2x2", BOUND)


def test_half_types_sum_the_gradients_of_all_positions(tmp_path) -> None:
    for tp_size in (1, 2):
        run_jobs([run_of("gpt-post-full", tp_size, 1, tmp_path, precision__dtype="bf16")], tp_size)
    one, two = (read_rows(tmp_path / "gpt-post-full" / f"{tp_size}x1") for tp_size in (1, 2))
    for row, other in zip(one, two, strict=True):
        assert other["train/loss"] == pytest.approx(row["train/loss"], rel=2e-3)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=2e-2)


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
