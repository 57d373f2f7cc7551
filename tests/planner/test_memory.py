import itertools

import pytest
import torch
from paper_models import paper_model, training

from lmscale.config import Layout, TransformerConfig
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, SingleRankCommunicator, sample_dropout_keys
from lmscale.planner.flops import scored_tokens
from lmscale.planner.memory import GIB, estimate_memory, first_that_fits, stage_memory, usable_bytes
from lmscale.planner.workload import Workload, auto_tp_sizes
from lmscale.training.step.optimizer import MixedPrecisionAdamW

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH, SEQUENCE, VOCAB = 5, 80, 500
ALONE = ParallelContext()


def small_model(architecture: str, **changes: object) -> TransformerConfig:
    fields = {
        "num_layers": 3,
        "hidden_size": 192,
        "num_attention_heads": 3,
        "vocab_size": VOCAB,
        "vocab_multiple": 100,
        "max_position_embeddings": SEQUENCE,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(family=architecture, **(fields | changes))


def saved_bytes(config: TransformerConfig, dtype: str, context: ParallelContext = ALONE) -> int:
    """Bytes of the distinct storages that a real forward pass saves for the backward pass, without weights."""
    model = build_model(config, context, seed=1, dtype=DTYPES[dtype])
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    storages, alive = {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no address is reused
        return tensor

    tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % VOCAB
    keys = sample_dropout_keys(seed=1, sample_numbers=torch.arange(BATCH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if config.family == "gpt":
            model(tokens, tokens, keys)
        else:
            model(tokens, torch.zeros_like(tokens), None, tokens, keys, scored_places(config))
    return sum(storages.values())


def scored_places(config: TransformerConfig) -> torch.Tensor:
    """The number of scored positions that the formulas assume."""
    return torch.arange(BATCH * scored_tokens(config, SEQUENCE))


CASES = list(
    itertools.product(
        *[("gpt", "bert"), ("sdpa", "exact"), ("fp32", "bf16"), (0.0, 0.1), ("none", "selective")],
        [(0.0, "pre"), (0.1, "post"), (0.0, "peri"), (0.1, "b2t")],
    )
)
QUICK = {("gpt", (0.0, "pre")), ("bert", (0.1, "post"))}


@pytest.mark.parametrize(
    "architecture, attention, dtype, attention_dropout, recompute, hidden_dropout, norm_order",
    [
        pytest.param(*case[:-1], *case[-1], marks=[pytest.mark.slow] * ((case[0], case[-1]) not in QUICK))
        for case in CASES
    ],
)
def test_activations_equal_those_saved_by_a_real_forward_pass(
    architecture, attention, dtype, attention_dropout, recompute, hidden_dropout, norm_order
) -> None:
    config = small_model(
        architecture,
        attention=attention,
        attention_dropout=attention_dropout,
        recompute=recompute,
        hidden_dropout=hidden_dropout,
        norm_order=norm_order,
    )
    gradient_of_rows = len(scored_places(config)) * 192 * DTYPES[dtype].itemsize  # which the loss keeps by itself
    measured = saved_bytes(config, dtype) + gradient_of_rows
    estimated = estimate_memory(training(config, BATCH, dtype=dtype, on_gpu=False), Layout()).activations
    # A lower bound within 1 %: LayerNorm statistics, token ids and label indices are not counted.
    assert estimated <= measured <= 1.01 * estimated


class Echo(SingleRankCommunicator):
    """Gives a rank of many its own numbers as the sum over the ranks."""

    def all_reduce(self, x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        return x.clone()


DUMMY_CASES = [("sdpa", "fp32", 0.0), ("exact", "fp32", 0.1), ("sdpa", "bf16", 0.1)]


@pytest.mark.parametrize("attention, dtype, dropout", DUMMY_CASES)
def test_activations_of_dummy_heads_equal_those_saved_by_a_real_forward_pass(attention, dtype, dropout) -> None:
    config = small_model("gpt", attention=attention, attention_dropout=dropout)
    context = ParallelContext(1, 2, tp_communicator=Echo(), pad_heads=True)  # 2 and 1 of 3 heads
    job = training(config, BATCH, dtype=dtype, on_gpu=False)
    estimate = estimate_memory(job, Layout(tp_size=2, pad_heads=True)).activations
    gradient_of_rows = BATCH * SEQUENCE * 192 * DTYPES[dtype].itemsize  # which the loss keeps by itself
    assert estimate <= saved_bytes(config, dtype, context) + gradient_of_rows <= 1.01 * estimate


@pytest.mark.parametrize("dtype, moments", [*((dtype, "fp32") for dtype in DTYPES), ("fp32", "bf16"), ("bf16", "bf16")])
def test_weights_gradients_and_optimizer_equal_those_of_real_steps(dtype: str, moments: str) -> None:
    config = small_model("gpt")
    model = build_model(config, ParallelContext(), seed=1, dtype=DTYPES[dtype])
    optimizer = MixedPrecisionAdamW(
        model.named_parameters(),
        OptimizerConfig(lr=1e-3, moments=moments),
        PrecisionConfig(dtype, initial_loss_scale=1.0),
        ParallelContext(),
    )
    tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % VOCAB
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens, tokens, sample_dropout_keys(seed=1, sample_numbers=torch.arange(BATCH))).backward()
        optimizer.step()
    assert optimizer.counters.known.num_updates == 2
    held = [*model.parameters(), *optimizer.tensors().values(), *optimizer.gradients().values()]
    held += [param.grad for param in model.parameters() if param.grad is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    estimate = estimate_memory(training(config, BATCH, dtype=dtype, half_moments=moments == "bf16"), Layout())
    assert sum(storages.values()) == estimate.weights + estimate.gradients + estimate.optimizer_state


def test_tensor_parallelism_divides_sharded_activations_and_keeps_replicated_ones() -> None:
    job = training(paper_model("gpt_8.3b"), 1)
    one, two, eight = (estimate_memory(job, Layout(tp_size=p)).activations for p in (1, 2, 8))
    replicated = 1024 * 3072 * (72 * 10 + 5)  # b s h x (10 per layer, 5 outside the layers)
    assert (one - replicated, two - replicated) == (8 * (eight - replicated), 4 * (eight - replicated))


def test_the_total_is_the_peak() -> None:
    piece = 4 * 50 * 2**20 * 6 + 51200 * 1536 * 4  # logits and a temporary fp32 copy; sum of the weight gradient
    large_batch = estimate_memory(training(paper_model("gpt_1.2b"), 8), Layout())
    state = large_batch.weights + large_batch.gradients + large_batch.optimizer_state
    assert large_batch.total == state + large_batch.activations + piece
    short = stage_memory(training(paper_model("gpt_355m"), 8, seq_length=1), Layout(pp_size=2))
    state = short.weights + short.gradients + short.optimizer_state
    embedding = 51200 * 1024 * 2  # its gradient, before it is copied into the buffer
    assert short.total == state + embedding + short.first_layer + short.gradient_in_flight


def test_a_compiled_update_of_bf16_moments_has_no_temporaries() -> None:
    config = paper_model("gpt_1.2b", recompute="full")
    eager, compiled = (
        estimate_memory(training(config, 1, half_moments=True, compiles=compiles), Layout())
        for compiles in (False, True)
    )
    assert (eager.update > GIB, compiled.update) == (True, 0)
    assert compiled.total < eager.total - GIB


def smallest(job: Workload, usable: int, pad_heads: bool = False, largest: int | None = None) -> int | None:
    layouts = [Layout(tp_size=p, pad_heads=pad_heads) for p in auto_tp_sizes(job, pad_heads, largest)]
    found = first_that_fits([(job, layout) for layout in layouts], usable)
    return found and found[1].tp_size


def test_the_smallest_layout_is_the_first_power_of_two_that_divides_and_fits() -> None:
    job = training(paper_model("gpt_8.3b"), 4)
    needs = {p: estimate_memory(job, Layout(tp_size=p)).total for p in (1, 2, 4, 8, 16, 32)}
    assert smallest(job, needs[1]) == 1
    assert smallest(job, needs[1] - 1) == 2
    assert smallest(job, needs[4]) == 4
    assert smallest(job, needs[32] - 1) is None
    assert smallest(job, needs[4], largest=3) is None
    job = training(paper_model("gpt_2.5b"), 4)  # 20 heads
    needed = estimate_memory(job, Layout(tp_size=4)).total
    assert (smallest(job, needed), smallest(job, needed - 1)) == (4, None)
    assert smallest(job, needed - 1, pad_heads=True) == 8


def test_ranks_that_share_a_device_split_its_memory_and_each_hold_a_framework() -> None:
    assert usable_bytes(12 * GIB, on_gpu=False, num_ranks=3) == int(3.5 * GIB)
    assert usable_bytes(12 * GIB, on_gpu=True) == 10 * GIB
    assert usable_bytes(GIB, on_gpu=True) < 0
