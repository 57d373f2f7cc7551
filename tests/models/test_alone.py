"""A model used on its own, as in a notebook: no context, process group or dropout keys; Hugging Face masks."""

import pytest
import torch
from sharding import random_batch, random_model, small_config, total_loss
from torch import Tensor
from torch.nn.functional import cross_entropy

from lmscale.config.family import family_of, load
from lmscale.models import BERT, GPT, build_model
from lmscale.parallel import ParallelContext

MODELS = {"gpt": GPT, "bert": BERT}


def logits_of(model, tokens: Tensor, **inputs) -> Tensor:
    found = model(tokens, **inputs)
    return found if isinstance(model, GPT) else found[0]


@pytest.fixture(params=MODELS)
def family(request) -> str:
    return request.param


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 99, (3, 7), generator=torch.Generator().manual_seed(3))


def test_a_model_needs_only_its_config_and_has_the_weights_of_the_default_seed(family: str, tokens: Tensor) -> None:
    config = small_config(family)
    model, built = MODELS[family](config), build_model(config, ParallelContext(), seed=1234)
    assert logits_of(model, tokens).shape == (3, 7, 104)
    pairs = zip(model.parameters(), built.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_the_logits_for_the_accuracy_are_those_of_the_model(family: str) -> None:
    config = small_config(family)
    model, batch = random_model(config, ParallelContext()).eval(), random_batch(config)
    names = ["token_types", "attention_mask"] if family == "bert" else []
    expected = logits_of(model, batch["tokens"], **{name: batch[name] for name in names})
    assert torch.equal(load(family_of(family).loss).token_logits(model, batch), expected)


def test_the_losses_are_those_of_torch_on_the_model_s_logits(family: str) -> None:
    config = small_config(family)
    model, batch = random_model(config, ParallelContext()).eval(), random_batch(config)
    loss = load(family_of(family).loss)
    logits = loss.token_logits(model, batch)[..., : config.vocab_size]
    expected = [cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)]
    if family == "bert":
        batch["scored"] = (batch["labels"].flatten() != -100).nonzero().flatten()
        order_logits = model(batch["tokens"], batch["token_types"], batch["attention_mask"])[1]
        expected.append(cross_entropy(order_logits, batch["sop_labels"], reduction="sum"))
    torch.testing.assert_close(loss.loss_sums(model, batch, None), torch.stack(expected))


def test_the_order_loss_of_a_half_type_is_computed_in_fp32() -> None:
    order_logits = torch.randn(37, 2, generator=torch.Generator().manual_seed(3)).bfloat16()
    labels = torch.arange(37) % 2
    batch = dict.fromkeys(("tokens", "token_types", "attention_mask", "labels", "scored")) | {"sop_labels": labels}
    found = load(family_of("bert").loss).loss_sums(lambda *_: (torch.tensor(3.0), order_logits), batch, None)
    assert torch.equal(found, torch.stack([found[0], cross_entropy(order_logits.float(), labels, reduction="sum")]))


def test_a_model_of_the_other_family_is_refused(family: str) -> None:
    (other,) = set(MODELS) - {family}
    with pytest.raises(ValueError, match=f"`family` must be that of a {MODELS[family].__name__}, but is '{other}'"):
        MODELS[family](small_config(other))


@pytest.mark.parametrize("attention", ["sdpa", "exact"])
def test_in_training_the_dropout_keys_are_drawn_from_torchs_generator(family: str, tokens: Tensor, attention) -> None:
    model = MODELS[family](small_config(family, hidden_dropout=0.2, attention_dropout=0.2, attention=attention))
    with torch.random.fork_rng():
        found = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            found.append(logits_of(model, tokens))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(logits_of(model.eval(), tokens), logits_of(model, tokens))


def test_a_model_of_torchs_default_half_type_trains(family: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = MODELS[family](small_config(family))
        total_loss(model, random_batch(model.config)).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(param.grad.dtype == torch.bfloat16 for param in model.parameters())


def test_printing_shows_the_shape_of_every_parameter(family: str) -> None:
    model = MODELS[family](small_config(family), ParallelContext(tp_size=2))
    shown = repr(model)
    assert "ColumnParallelLinear(weight [36, 24] of [72, 24], bias [36] of [72])" in shown
    assert "LayerNorm(weight [24], bias [24])" in shown and "weight [52, 24] of [104, 24]" in shown
    assert "layers.0" not in shown  # each module shows its own parameters
    assert "position_embedding [13, 24]" in shown


@pytest.mark.parametrize("attention", ["sdpa", "exact"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_masks_are_accepted_and_float_masks_refused(family, tokens, attention, dtype) -> None:
    model = MODELS[family](small_config(family, attention=attention)).double().eval()
    mask = torch.ones(3, 7, dtype=dtype)
    mask[1, 4:] = 0
    found = logits_of(model, tokens, attention_mask=mask)
    torch.testing.assert_close(found[1:2, :4], logits_of(model, tokens[1:2, :4]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0], logits_of(model, tokens)[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="`attention_mask` must be of bool .* but is of torch.float32"):
        model(tokens, attention_mask=mask.float())


@pytest.mark.parametrize("attention", ["sdpa", "exact"])
def test_left_padding_does_not_change_a_gpts_logits(tokens: Tensor, attention: str) -> None:
    model = GPT(small_config("gpt", attention=attention)).double().eval()
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[0, :2] = 0
    changed = tokens.clone()
    changed[0, :2] = (tokens[0, :2] + 1) % 99
    before, after = model(tokens, attention_mask=mask), model(changed, attention_mask=mask)
    assert before.isfinite()[..., :99].all() and torch.equal(before[0, 2:], after[0, 2:])
