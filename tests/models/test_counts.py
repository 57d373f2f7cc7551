"""Parameter counts of the paper's nine models, from the real modules on the meta device and the files of `conf/model`.

Expected numbers: 12 h^2 + 13 h per layer; the rest computed by hand from the published architectures.
"""

import pytest
from composed import composed
from sharding import count_model_parameters

from lmscale.config import Layout, TransformerConfig
from lmscale.config.family import family_of
from lmscale.config.model import ModelConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.params import count_parameters

# name: (with the natural 50,257 or 30,522 rows, with 51,200 or 30,720)
COUNTS = {
    "gpt_355m": (354_823_168, 355_788_800),
    "gpt_1.2b": (1_212_031_488, 1_213_479_936),
    "gpt_2.5b": (2_488_598_400, 2_490_408_960),
    "gpt_4.2b": (4_196_936_448, 4_199_109_120),
    "gpt_8.3b": (8_314_143_744, 8_317_040_640),
    "gpt_8.3b_24heads": (8_314_143_744, 8_317_040_640),
    "gpt_8.3b_16heads": (8_314_143_744, 8_317_040_640),
    "bert_336m": (336_226_108, 336_429_058),
    "bert_752m": (751_431_484, 751_685_122),
    "bert_1.3b": (1_280_595_772, 1_281_001_474),
    "bert_3.9b": (3_869_081_404, 3_869_588_482),
}
TWENTY_HEADS = ("gpt_2.5b", "bert_752m")


def paper_config(name: str, **changes) -> TransformerConfig:
    values = composed("train", f"model={name}")["model"] | changes
    assert values.pop("name") == name
    return ModelConfig(**values).resolve(values["vocab_size"])


@pytest.mark.parametrize("name", COUNTS)
def test_a_paper_model_has_exactly_its_parameters(name: str) -> None:
    """Also by the planner's formulas."""
    for changes, number in zip(({"vocab_multiple": 1}, {"norm_order": "post"}), COUNTS[name], strict=True):
        config = paper_config(name, **{"norm_order": "pre"} | changes)
        assert sum(count_model_parameters(config)) == count_parameters(config).total == number


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in ("gpt_355m", "gpt_2.5b", "gpt_8.3b_24heads", "bert_3.9b")))
        for n in COUNTS
    ],
)
def test_the_shards_of_every_layout_sum_to_the_model_counting_replicated_parameters_once(name: str) -> None:
    config = paper_config(name)
    whole = build_model(config, ParallelContext(), seed=None, device="meta")
    shapes = {key: param.shape for key, param in whole.named_parameters()}
    for tp_size in (2, 4) if name in TWENTY_HEADS else (2, 4, 8):
        sharded, replicated = count_model_parameters(config, tp_size)
        assert tp_size * sharded + replicated == COUNTS[name][1]
        planned = count_parameters(config, Layout(tp_size=tp_size))
        assert (planned.sharded_per_rank, planned.replicated) == (sharded, replicated)
        last = build_model(config, ParallelContext(tp_rank=tp_size - 1, tp_size=tp_size), seed=None, device="meta")
        assert {key: param.shard.full_shape for key, param in last.named_parameters()} == shapes


@pytest.mark.parametrize(
    "name, tp_size, message",
    [
        ("gpt_355m", 3, r"`num_attention_heads` must be a multiple of `tp_size` \(3\), but is 16"),
        ("bert_3.9b", 16, r"`num_attention_heads` must be a multiple of `tp_size` \(16\), but is 40"),
    ],
)
def test_other_indivisible_sizes_are_refused(name: str, tp_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(paper_config(name), ParallelContext(tp_size=tp_size), seed=None, device="meta")


def test_the_replicated_parameters_are_norms_row_biases_positions_and_heads() -> None:
    config = paper_config("bert_336m", num_layers=1)
    model = build_model(config, ParallelContext(tp_size=2), seed=None, device="meta")
    layer = "transformer.layers.0."
    assert {name for name, param in model.named_parameters() if not param.shard.replicated} == {
        "transformer.word_embedding.weight",
        layer + "attention.qkv.weight",
        layer + "attention.qkv.bias",
        layer + "attention.output.weight",
        layer + "mlp.up.weight",
        layer + "mlp.up.bias",
        layer + "mlp.down.weight",
        "lm_head.bias",
    }


def test_the_products_that_the_planner_counts_for_the_heads_are_those_of_their_weights() -> None:
    config = TransformerConfig("bert", 1, 48, 4, 96, 16)
    sizes = {
        name: param.numel() for name, param in build_model(config, ParallelContext(), seed=None).named_parameters()
    }
    per_token, per_sequence = family_of("bert").head.multiply_adds(48)
    assert per_token == sizes["lm_head.dense.weight"]
    assert per_sequence == sizes["pooler.weight"] + sizes["order_head.weight"]
