"""Where sequence parallelism and micro-batches in halves are refused; test_layouts.py compares runs."""

import pytest
from runs import tiny_run

from lmscale.config import Layout
from lmscale.config.zero_shot import LambadaConfig, ZeroShotConfig
from lmscale.parallel import ParallelContext


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
