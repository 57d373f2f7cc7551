import pytest
import torch
from paper_models import SIZES, paper_model
from torch.utils.flop_counter import FlopCounterMode

from lmscale.config import Recompute, TransformerConfig
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
    "name, seq_length, model, hardware",  # GFLOPs per token
    [
        ("gpt_355m", 1024, 2.429, 3.133),
        ("gpt_1.2b", 1024, 8.022, 10.538),
        ("gpt_2.5b", 1024, 16.197, 21.399),
        ("gpt_4.2b", 1024, 26.981, 35.739),
        ("gpt_8.3b", 1024, 52.584, 69.797),
        ("bert_336m", 512, 1.991, 2.646),  # 2.151 and 2.805 with the projection of all positions
        ("bert_1.3b", 512, 7.606, 10.123),  # 7.926 and 10.442
        ("bert_3.9b", 512, 23.475, 31.276),  # 23.874 and 31.676
    ],
)
def test_flops_per_token_of_the_paper_models(name: str, seq_length: int, model: float, hardware: float) -> None:
    # BERT values use 30,592 rows; GPT's 51,200 rows are a multiple of 128 too, but not the next one.
    config = paper_model(name, recompute="full", vocab_multiple=1024 if name.startswith("gpt") else 128)
    assert model_flops_per_step(config, seq_length, 1) / seq_length / 1e9 == pytest.approx(model, abs=5e-4)
    assert hardware_flops_per_step(config, seq_length, 1) / seq_length / 1e9 == pytest.approx(hardware, abs=5e-4)


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


def test_recomputation_adds_only_to_hardware_flops() -> None:
    counts = {}
    for recompute in Recompute:
        config = paper_model("gpt_1.2b", recompute=recompute)
        counts[recompute] = hardware_flops_per_step(config, 1024, 8)
        assert model_flops_per_step(config, 1024, 8) == counts[Recompute.NONE]
    assert counts[Recompute.NONE] < counts[Recompute.SELECTIVE] < counts[Recompute.FULL]


@pytest.mark.parametrize(
    "name, dtype, tflops_per_s",
    [
        ("Tesla V100-SXM3-32GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-SXM3-32GB", "fp16", 125.0),
        ("Tesla V100-SXM3-32GB-H", "fp16", 130.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "fp64", 67.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "fp16", 71.0),
        ("Tesla T4", "fp16", 65.0),
        ("NVIDIA B200", "bf16", 2250.0),
    ],
)
def test_devices_are_known_by_torchs_names(name: str, dtype: str, tflops_per_s: float) -> None:
    assert dense_peak_flops_per_s(name, dtype) == tflops_per_s * 1e12


def test_fp32_is_compared_with_tf32_only_if_products_may_use_it() -> None:
    assert dense_peak_flops_per_s("NVIDIA A100-SXM4-40GB", "fp32", "highest") == 19.5e12
    assert dense_peak_flops_per_s("NVIDIA A100-SXM4-40GB", "fp32", "medium") == 156e12
    assert dense_peak_flops_per_s("Tesla V100-SXM2-32GB", "fp32", "medium") == 15.7e12
    assert dense_peak_flops_per_s("NVIDIA A100-SXM4-40GB", "bf16", "medium") == 312e12


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("cpu", "fp32"),
        ("AMD EPYC 9554 64-Core Processor", "bf16"),
        ("NVIDIA H20", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16"),
        ("NVIDIA A10G", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),
    ],
)
def test_an_unknown_device_or_type_has_no_peak(name: str, dtype: str) -> None:
    assert dense_peak_flops_per_s(name, dtype) is None
