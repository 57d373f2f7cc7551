import pytest
import torch
from paper_models import SIZES, paper_model
from torch.utils.flop_counter import FlopCounterMode

from lmscale.config import TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, sample_dropout_keys
from lmscale.planner.flops import dense_peak_flops_per_s, hardware_flops_per_step, model_flops_per_step, scored_tokens


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
