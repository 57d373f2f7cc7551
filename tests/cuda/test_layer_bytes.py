"""The planner's bytes, launches and kept activations of a layer against what torch.compile generates for it.

Sizes are those of `analysis/benchmarks/h200.sh`: Inductor cuts its reductions by the number of rows.
"""

import dataclasses
from pathlib import Path

import fake_gpu
import pytest

from lmscale.config import Layout, TransformerConfig
from lmscale.planner.layer_operations import NORM_INPUT_BYTES, LayerCounts
from lmscale.planner.memory import estimate_memory
from lmscale.planner.step_operations import step_operations
from lmscale.planner.workload import BYTES, Workload

pytestmark = pytest.mark.slow
# What the planner leaves out: weights and biases that a kernel reads besides, and partial sums.
TOLERANCE, FLOAT8_TOLERANCE = 0.01, 0.03
KEPT, KEPT_FLOAT8 = 0.01, 0.08  # in float8 the choice among masks and inputs differs a little by layout and placement
# With fewer than 4,096 rows, or than twice the columns, Inductor sums the gradients of each LayerNorm in a pass of its
# own (`MixOrderReduction` in torch/_inductor/scheduler.py). It reads gradient and input again: bytes per element.
SUMS_APART = (BYTES["bf16"] + NORM_INPUT_BYTES) + 2 * BYTES["bf16"]


@pytest.mark.parametrize(
    "family, hidden_size, heads, s, b, float8, model",
    [
        ("gpt", 1536, 16, 1024, 32, False, {}),
        ("bert", 1024, 16, 512, 128, False, {}),
        ("gpt", 1920, 20, 1024, 8, True, {}),
        ("bert", 2560, 40, 512, 24, False, {}),
        ("gpt", 1536, 16, 1024, 16, False, {"norm_order": "post"}),
        ("gpt", 1536, 16, 1024, 16, False, {"recompute": "selective"}),
        ("gpt", 1536, 16, 1024, 16, False, {"hidden_dropout": 0.0}),
    ],
)
def test_a_layer_moves_the_bytes_that_the_planner_counts(
    guard, family, hidden_size, heads, s, b, float8, model
) -> None:
    case = {"family": family, "hidden_size": hidden_size, "heads": heads, "s": s, "b": b, "float8": float8}
    check_layer(guard, case | {"model": model}, FLOAT8_TOLERANCE if float8 else TOLERANCE)


GPT = {"hidden_size": 3072, "heads": 32, "s": 1024, "b": 16, "tp_size": 2}
BERT = {"family": "bert", "hidden_size": 2560, "heads": 40, "s": 512, "b": 24, "tp_size": 8}


@pytest.mark.parametrize(
    "case, tolerance",
    [
        (GPT | {"sequence_parallel": True}, TOLERANCE),
        (GPT | {"tp_size": 8, "b": 8}, TOLERANCE),
        (GPT | {"sequence_parallel": True, "model": {"norm_order": "post"}}, TOLERANCE),
        (GPT | {"sequence_parallel": True, "float8": True}, FLOAT8_TOLERANCE),
    ],
)
def test_a_layer_of_a_tensor_rank_moves_the_bytes_that_the_planner_counts(guard, case, tolerance) -> None:
    check_layer(guard, case, tolerance)


@pytest.mark.parametrize("case", [BERT, GPT | {"tp_size": 8, "b": 8}])
def test_with_few_rows_the_planner_leaves_out_the_passes_that_sum_layer_norms_gradients(guard, case) -> None:
    check_layer(guard, case | {"sequence_parallel": True}, TOLERANCE, SUMS_APART)


def check_layer(guard: Path, case: dict, tolerance: float, left_out: int = 0) -> None:
    """`left_out`: bytes of the backward pass, per element of a rank's tokens, that the planner does not count."""
    found = fake_gpu.run("layer_bytes.py", guard, case)
    assert len(found["graphs"]) == 2
    job, layout = planned(case)
    layer = LayerCounts(job, layout, job.config.placement)
    more = 0, left_out * layer.own * layer.width
    for calls, operations, extra in zip(
        found["graphs"], (layer.forward("forward"), layer.backward()), more, strict=True
    ):
        passes = [o for o in operations if o.kind == "elementwise"]
        generated = [num_bytes for call, num_bytes in calls if call.startswith("triton_")]
        assert sum(o.num_bytes for o in passes) + extra == pytest.approx(sum(generated), rel=tolerance)
        assert abs(sum(o.launches for o in passes) - len(generated)) <= 2
        assert sum(o.kind == "product" for o in operations) == sum(
            "mm" in call for call, _ in calls if "extern" in call
        )
    check_kept(found["kept"], job, layout)


def planned(case: dict) -> tuple[Workload, Layout]:
    s, b = case["s"], case["b"]
    config = TransformerConfig(
        case.get("family", "gpt"), 2, case["hidden_size"], case["heads"], 50257, s, **case.get("model", {})
    )
    layout = Layout(tp_size=case.get("tp_size", 1), sequence_parallel=case.get("sequence_parallel", False))
    return Workload(config, b, b, s, "fp8" if case.get("float8") else "bf16", compiles=True), layout


def check_kept(kept: int, job: Workload, layout: Layout) -> None:
    deeper = dataclasses.replace(job, config=dataclasses.replace(job.config, num_layers=3))
    layer = estimate_memory(deeper, layout).activations - estimate_memory(job, layout).activations
    assert layer == pytest.approx(kept, rel=KEPT_FLOAT8 if job.dtype == "fp8" else KEPT)


@pytest.mark.parametrize(
    "case", [GPT | {"model": {"attention": "exact"}}, GPT | {"float8": True, "model": {"norm_order": "post"}}]
)
def test_a_layer_keeps_what_the_planner_counts(guard, case) -> None:
    check_kept(fake_gpu.run("layer_bytes.py", guard, case)["kept"], *planned(case))


@pytest.mark.parametrize(
    "family, model",
    [
        ("bert", {}),
        ("gpt", {}),
        ("gpt", {"hidden_dropout": 0.0}),
        ("bert", {"norm_order": "post"}),
    ],
)
def test_what_follows_the_embeddings_lookups_is_one_kernel_forward(guard, family, model) -> None:
    h, heads, s, b = 1024, 16, 512, 128
    case = {"family": family, "hidden_size": h, "heads": heads, "s": s, "b": b, "model": model, "part": "embedding"}
    graphs = fake_gpu.run("layer_bytes.py", guard, case)["graphs"]
    assert len(graphs) == 2 and len(graphs[0]) == 1
    config = TransformerConfig(family, 2, h, heads, 50257, s, **model)
    planned = step_operations(Workload(config, b, b, s, "bf16"), Layout())
    for calls, operation in zip(graphs, (o for o in planned if o.name == "embedding sum, dropout"), strict=True):
        assert operation.num_bytes == pytest.approx(sum(num_bytes for _, num_bytes in calls), rel=TOLERANCE)
        assert operation.launches == len(calls)
