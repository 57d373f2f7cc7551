"""Parameters and FLOPs by the planner's formulas, against the paper, published counts and the real modules."""

import math

import pytest
import torch
from paper_models import SIZES, paper_model
from torch.utils.flop_counter import FlopCounterMode

from lmscale.config import Layout, TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, sample_dropout_keys
from lmscale.partition import plan_buffer
from lmscale.planner.flops import dense_peak_flops_per_s, hardware_flops_per_step, model_flops_per_step, scored_tokens
from lmscale.planner.params import count_parameters, rank_buffer, rank_parameters


@pytest.mark.parametrize("name", ["gpt_2.5b", "bert_752m"])
def test_dummy_heads_are_in_every_rank_and_not_in_the_model(name: str) -> None:
    config, layout = paper_model(name), Layout(tp_size=8, pad_heads=True)
    count = count_parameters(config, layout)
    assert (count.total, count.parts) == (count_parameters(config).total, count_parameters(config).parts)
    sizes = sorted(each.size for each in rank_parameters(config, layout))
    assert sum(sizes) == count.per_rank
    for rank in (0, 7):  # with 3 heads each, of which those of the last are dummies
        context = ParallelContext(rank, 8, pad_heads=True)
        parameters = list(build_model(config, context, seed=None, device="meta").parameters())
        assert sorted(param.numel() for param in parameters) == sizes
        assert sum(math.prod(param.shard.full_shape) for param in parameters) == count.total


@pytest.mark.parametrize("name", ["gpt_355m", "bert_3.9b"])
@pytest.mark.parametrize("tp_size, norm_order", [(1, "pre"), (2, "post"), (8, "pre")])
def test_the_parameters_are_those_of_the_real_module(name: str, tp_size: int, norm_order: str) -> None:
    """In the model's order, in which the gradient buffer has them."""
    config = paper_model(name, norm_order=norm_order, qk_norm=tp_size > 1)
    with torch.device("meta"):
        model = build_model(config, ParallelContext(tp_size=tp_size), seed=None)
    real = [(param.numel(), not param.shard.replicated) for param in model.parameters()]
    planned = [(size, is_sharded) for _, size, is_sharded in rank_parameters(config, Layout(tp_size=tp_size))]
    assert real == planned
    parameters, layout = list(model.parameters()), Layout(tp_size=tp_size)
    row_lengths = {param.shape[-1] for param in parameters if param.ndim > 1}
    expected = plan_buffer([param.numel() for param in parameters], row_lengths)
    assert rank_buffer(config, layout, on_gpu=False) == expected


@pytest.mark.parametrize("name", SIZES)
def test_flops_equal_the_closed_forms_of_the_paper(name: str) -> None:
    config = paper_model(name, recompute="full")
    s, batch, layers, h, v = 512, 7, config.num_layers, config.hidden_size, config.padded_vocab_size
    v *= scored_tokens(config, s) / s  # BERT projects 77 of 512 positions
    model = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    hardware = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert model_flops_per_step(config, s, batch) == pytest.approx(model, rel=1e-14)
    assert hardware_flops_per_step(config, s, batch) == pytest.approx(hardware, rel=1e-14)


@pytest.mark.parametrize(
    "recompute, ffn_hidden_size", [("none", None), ("none", 58), ("selective", None), ("full", None), ("full", 58)]
)
def test_flops_equal_those_counted_in_a_real_step(recompute: str, ffn_hidden_size: int | None) -> None:
    config = TransformerConfig(
        family="gpt",
        num_layers=3,
        hidden_size=36,
        num_attention_heads=4,
        vocab_size=97,
        vocab_multiple=10,
        max_position_embeddings=17,
        ffn_hidden_size=ffn_hidden_size,
        recompute=recompute,
        attention="exact",
    )
    model = build_model(config, ParallelContext(), seed=3)
    tokens = torch.arange(5 * 13).view(5, 13) % 97
    keys = sample_dropout_keys(seed=3, sample_numbers=torch.arange(5))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, keys).sum().backward()
    assert hardware_flops_per_step(config, 13, 5) == counter.get_total_flops()


PEAKS = {  # torch's name of a device, a type, and its TFLOP/s
    ("Tesla V100-SXM3-32GB", "fp16"): 125.0,
    ("Tesla V100-SXM3-32GB-H", "fp16"): 130.0,
    ("NVIDIA H100 80GB HBM3", "bf16"): 989.4,
    ("NVIDIA H100 PCIe", "fp16"): 756.0,
    ("NVIDIA H200", "bf16"): 989.4,
    ("NVIDIA GeForce RTX 4090", "bf16"): 165.2,
    ("Tesla T4", "fp16"): 65.0,
    ("NVIDIA B200", "bf16"): 2250.0,
    ("cpu", "fp32"): None,
    ("NVIDIA H20", "bf16"): None,
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"): None,
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"): None,
    ("NVIDIA A10G", "bf16"): None,
    ("Tesla V100-SXM2-16GB", "bf16"): None,
}


def test_devices_are_known_by_torchs_names_and_others_have_no_peak() -> None:
    assert {case: dense_peak_flops_per_s(*case) for case in PEAKS} == {
        case: peak and peak * 1e12 for case, peak in PEAKS.items()
    }


def test_fp32_is_compared_with_tf32_only_if_products_may_use_it() -> None:
    assert dense_peak_flops_per_s("NVIDIA A100-SXM4-40GB", "fp32", "highest") == 19.5e12
    assert dense_peak_flops_per_s("NVIDIA A100-SXM4-40GB", "fp32", "medium") == 156e12
    assert dense_peak_flops_per_s("Tesla V100-SXM2-32GB", "fp32", "medium") == 15.7e12
    assert dense_peak_flops_per_s("NVIDIA A100-SXM4-40GB", "bf16", "medium") == 312e12
