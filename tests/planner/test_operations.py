"""The operations of a step: their FLOPs, bytes and launches."""

import pytest
from paper_models import paper_model, training

from lmscale.config import Layout
from lmscale.planner.communication import step_collectives
from lmscale.planner.flops import hardware_flops_per_step
from lmscale.planner.layer_operations import MAGNITUDE
from lmscale.planner.operation import Operation
from lmscale.planner.operations import OPTIMIZER_LAUNCHES, step_operations
from lmscale.planner.params import count_parameters


def total(operations: list[Operation], name: str) -> int:
    return sum(o.count * getattr(o, name) for o in operations)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
def test_the_flops_of_a_step_are_the_hardware_flops(recompute: str, dtype: str) -> None:
    config = paper_model("gpt_2.5b", recompute=recompute)
    for tp_size in (1, 2):
        found = step_operations(training(config, 4, n=3, dtype=dtype), Layout(tp_size=tp_size))
        assert tp_size * total(found, "flops") == hardware_flops_per_step(config, 1024, 12)


@pytest.mark.parametrize("attention", ["flash", "efficient"])
def test_every_attention_but_exact_is_a_fused_core(attention: str) -> None:
    fused, sdpa, exact = (
        step_operations(training(paper_model("gpt_1.2b", attention=kind, attention_dropout=0.0), 4), Layout())
        for kind in (attention, "sdpa", "exact")
    )
    assert fused == sdpa != exact


def test_a_fused_core_is_not_recomputed_selectively() -> None:
    none, selective = (
        step_operations(training(paper_model("gpt_1.2b", recompute=mode), 4), Layout())
        for mode in ("none", "selective")
    )
    assert total(none, "flops") == total(selective, "flops")
    assert total(selective, "num_bytes") - total(none, "num_bytes") == 40 * 4 * 1024 * 4 * 1536 * 2  # the GELU's result


@pytest.mark.parametrize(
    "dtype, half_moments, buffer, read, written",  # gradient twice, master, moments; these and a half-type weight
    [
        ("bf16", False, 6 + 10 + 10, 8 + 4 + 8, 4 + 8 + 2),  # the first micro-batch is copied, two are added
        ("fp16", True, 6 + 10 + 10, 8 + 4 + 4, 4 + 4 + 2),
        ("fp32", False, 8 + 12 + 12, 8 + 4 + 8, 4 + 8),
        ("fp32", True, 8 + 12 + 12, 8 + 4 + 4, 4 + 4),
        ("fp64", True, 16 + 24 + 24, 16 + 8 + 4, 8 + 4),
    ],
)
def test_the_update_and_the_gradient_buffer_move_a_number_of_bytes_per_parameter(
    dtype: str, half_moments: bool, buffer: int, read: int, written: int
) -> None:
    config = paper_model("gpt_1.2b")
    n = count_parameters(config).total
    found = step_operations(training(config, 4, n=3, dtype=dtype, half_moments=half_moments), Layout())
    (update,) = (o for o in found if o.kind == "optimizer")
    assert (update.read, update.written) == (n * read, n * written)
    assert sum(o.count * o.num_bytes for o in found if o.phase == "gradients") == n * buffer


@pytest.mark.parametrize("name, recompute", [("gpt_8.3b", "none"), ("bert_3.9b", "full")])
def test_float8_reads_what_sequence_parallelism_gathers_once_more(name: str, recompute: str) -> None:
    config, layout = paper_model(name, recompute=recompute), Layout(tp_size=8, sequence_parallel=True)
    float8, half = (training(config, 4, n=3, dtype=dtype) for dtype in ("fp8", "bf16"))
    again = [o for o in step_operations(float8, layout) if o.name.endswith(MAGNITUDE)]
    sent = step_collectives(float8, layout)
    gathered = [c for c in sent if c.kind == "all_gather" and "attention and MLP" in c.what]
    assert sum(o.count for o in again) == sum(c.count for c in gathered)
    assert sum(o.count * o.read for o in again) == sum(c.total_bytes for c in gathered)
    assert not any(o.name.endswith(MAGNITUDE) for o in step_operations(half, layout))


def test_with_zero1_a_rank_updates_its_part() -> None:
    config = paper_model("gpt_1.2b")

    def update(layout: Layout) -> Operation:
        return next(o for o in step_operations(training(config, 4, layout), layout) if o.kind == "optimizer")

    whole, cut = update(Layout(tp_size=1, dp_size=8)), update(Layout(tp_size=1, dp_size=8, zero1=True))
    assert whole.num_bytes - 8 * 26 <= 8 * cut.num_bytes <= whole.num_bytes
    assert cut.launches - OPTIMIZER_LAUNCHES < (whole.launches - OPTIMIZER_LAUNCHES) / 4
