"""The predicted memory of a rank against the peak bytes of all live tensors in a real step."""

import dataclasses
import json
from pathlib import Path

import pytest

from analysis.correctness import peak_memory
from analysis.correctness.peak_memory import CASES
from lmscale.parallel import ParallelContext

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "analysis" / "correctness" / "records" / "peak_memory.json").read_text(encoding="utf-8"))
ONE_RANK = [name for name, case in CASES.items() if case.tp_size == 1 and not case.traced]
TWO_RANKS = [name for name, case in CASES.items() if case.tp_size == 2]
TRACED = [name for name, case in CASES.items() if case.traced]
QUICK = ("355M, bf16", "BERT 336M, bf16")
SLOW_ON_ONE = (
    "gpt, fp32, several pieces of logits",
    "gpt, bf16, several pieces of logits",
    "gpt, fp32, full recomputation",
    "gpt, bf16, selective",
    "gpt, bf16, long, exact, full recomputation",
    "bert, bf16, full recomputation",
    "gpt, bf16, scores kept",
)
QUICK_ON_TWO = ["gpt, fp32, 2 ranks", "gpt, fp32, 2 ranks, sequence"]


def assert_within_5_percent(name: str, tracked: int) -> None:
    predicted = CASES[name].predicted
    assert abs(predicted / tracked - 1) < 0.05, f"predicted {predicted:,}, tracked {tracked:,}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_ON_ONE)) for n in ONE_RANK])
def test_the_predicted_peak_of_one_rank_is_within_5_percent(name: str) -> None:
    assert_within_5_percent(name, peak_memory.measure(CASES[name], ParallelContext()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK_ON_TWO, id="two of the cases"),
        pytest.param([n for n in TWO_RANKS if n not in QUICK_ON_TWO], id="the rest"),
    ],
)
def test_the_predicted_peak_of_each_of_two_tensor_ranks_is_within_5_percent(names: list[str]) -> None:
    assert {CASES[name].sequence_parallel for name in names} == {False, True}
    for name, tracked in peak_memory.measure_on_two_ranks(names).items():
        assert_within_5_percent(name, tracked)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in TRACED])
def test_the_predicted_peak_with_the_kernels_of_a_gpu_is_within_5_percent(name: str) -> None:
    assert_within_5_percent(name, peak_memory.measure_traced(CASES[name]))


@pytest.mark.slow
def test_halves_of_a_micro_batch_need_the_memory_of_the_whole() -> None:
    case = dataclasses.replace(CASES["355M, bf16"], tp_size=2)
    whole, halves = (peak_memory.measure_traced(dataclasses.replace(case, batch_halves=h)) for h in (False, True))
    assert halves == pytest.approx(whole, rel=0.005)
    assert halves == pytest.approx(case.predicted, rel=0.05)


def test_the_committed_record_has_the_current_prediction_of_every_case() -> None:
    rows = {row["name"]: row for row in RECORD["config"]["rows"]}
    assert {name: row["predicted"] for name, row in rows.items()} == {n: case.predicted for n, case in CASES.items()}
    assert RECORD["environment"]["dirty"] is False
    assert max(abs(row["predicted"] / row["tracked"] - 1) for row in rows.values()) < 0.03


def test_leaving_out_any_part_is_detected() -> None:
    case = CASES["1.2B, bf16, full recomputation"]
    tracked = next(
        row["tracked"] for row in RECORD["config"]["rows"] if row["name"] == "1.2B, bf16, full recomputation"
    )
    layer = 1024 * case.micro_batch_size * 1536 * 34  # recomputed activations of one layer
    assert abs((case.predicted - layer) / tracked - 1) > 0.05
