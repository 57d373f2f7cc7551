"""Our weights in Hugging Face models, by the converter's table of names, give the same logits, loss and gradients."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from sharding import largest, random_batch, random_model, small_config
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from lmscale.config import TransformerConfig
from lmscale.models.hugging_face import model_of
from lmscale.parallel import ParallelContext


def to_transformers(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Full tensors (tp_size 1), weights or gradients, with the published model's names and layouts."""
    pairs = model_of(config).pairs(config)
    assert {pair.ours for pair in pairs} == set(tensors)
    return {pair.theirs: pair.to_theirs(tensors[pair.ours], config) for pair in pairs}


def published_model(config: TransformerConfig) -> nn.Module:
    """The untrained published model with the sizes of `config`: GPT-2, BERT (post) or Megatron-BERT (pre), no dropout.

    GELU and epsilon are the published ones, not taken from `config`, so that a wrong default of ours is detected.
    """
    if config.family == "gpt":
        sizes = GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            activation_function="gelu_new",
            layer_norm_epsilon=1e-5,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=None,  # the published ids exceed a small vocabulary
            eos_token_id=None,
            attn_implementation="eager",
        )
        return GPT2LMHeadModel(sizes)
    is_post = config.norm_order == "post"
    sizes = (BertConfig if is_post else MegatronBertConfig)(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.ffn_size,
        hidden_act="gelu",
        layer_norm_eps=1e-12 if is_post else 1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return (BertForPreTraining if is_post else MegatronBertForPreTraining)(sizes)


def load_published(config: TransformerConfig, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The published model with our weights, in their dtype; every parameter of either side must have a counterpart."""
    model = published_model(config).to(next(iter(tensors.values())).dtype)
    parameters, mapped = dict(model.named_parameters()), to_transformers(tensors, config)
    assert set(parameters) == set(mapped)
    with torch.no_grad():
        for name, param in parameters.items():
            assert param.shape == mapped[name].shape, name
            param.copy_(mapped[name])
    return model


# This tests the defaults of the norm order and the architecture (epsilon, GELU), so they are not set here.
MODELS = {
    "GPT2LMHeadModel": {"family": "gpt", "norm_order": "pre"},
    "BertForPreTraining": {"family": "bert", "norm_order": "post"},
    "MegatronBertForPreTraining": {"family": "bert", "norm_order": "pre"},
}
# Logits and losses are between 1 and 6. Gradients of queries and keys are small differences of large terms (softmax
# ignores a shared offset), so their relative rounding error is 4e-4 in fp32 with post-norm, and 1e-13 in fp64.
BOUNDS = {
    torch.float32: {"logits": 1e-4, "loss": 1e-5, "gradients": 2e-3},
    torch.float64: {"logits": 1e-12, "loss": 1e-12, "gradients": 1e-10},
}


def make_config(name: str, **changes) -> TransformerConfig:
    return small_config(**{**MODELS[name], "num_layers": 3, "vocab_multiple": 1, **changes})


def make_batch(config: TransformerConfig) -> dict[str, Tensor]:
    """A batch whose labels both sides can score: none on padding, none after GPT's last token."""
    batch = random_batch(config)
    if config.family == "bert":
        batch["labels"][~batch["attention_mask"]] = -100
    else:
        batch["labels"][:, -1] = -100
    return batch


def our_outputs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """(logits [b, s, v] and for BERT order logits [b, 2]; mean loss, for BERT the sum of two means)."""
    num_scored = (batch["labels"] != -100).sum()
    if model.config.family == "gpt":
        return [model(batch["tokens"])], model(batch["tokens"], batch["labels"]) / num_scored
    inputs = batch["tokens"], batch["token_types"], batch["attention_mask"]
    summed, order_logits = model(*inputs, batch["labels"])
    loss = summed / num_scored + F.cross_entropy(order_logits, batch["sop_labels"])
    return list(model(*inputs)), loss


def their_outputs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """The same for the published model, with its own loss if it keeps the precision."""
    if model.config.model_type == "gpt2":
        # It shifts the labels itself: its label at a position is our label at the previous one.
        shifted = torch.cat([torch.full_like(batch["labels"][:, :1], -100), batch["labels"][:, :-1]], dim=1)
        output = model(input_ids=batch["tokens"], labels=shifted)
        loss = output.loss
        if output.logits.dtype == torch.float64:  # its loss rounds the logits to fp32
            loss = F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
        return [output.logits], loss
    output = model(
        input_ids=batch["tokens"],
        token_type_ids=batch["token_types"],
        attention_mask=batch["attention_mask"].long(),
        labels=batch["labels"],
        next_sentence_label=batch["sop_labels"],
    )
    return [output.prediction_logits, output.seq_relationship_logits], output.loss


def compare(config: TransformerConfig, dtype: torch.dtype) -> dict[str, float]:
    """Largest absolute differences of logits (at real positions) and loss, and of gradients relative to the largest."""
    ours = random_model(config, ParallelContext()).to(dtype)
    theirs = load_published(config, {name: p.detach() for name, p in ours.named_parameters()})
    batch = make_batch(config)
    (our_logits, our_loss), (their_logits, their_loss) = our_outputs(ours, batch), their_outputs(theirs, batch)
    our_loss.backward()
    their_loss.backward()

    real = batch.get("attention_mask", torch.ones_like(batch["tokens"], dtype=torch.bool))
    our_logits[0], their_logits[0] = our_logits[0][real][:, : config.vocab_size], their_logits[0][real]
    gradients = to_transformers({name: p.grad for name, p in ours.named_parameters()}, config)
    highest = torch.stack([p.grad.abs().max() for p in theirs.parameters()]).max()
    return {
        "logits": largest((a - b).abs().max() for a, b in zip(our_logits, their_logits, strict=True)),
        "loss": largest([(our_loss - their_loss).abs()]),
        "gradients": largest(
            # A key bias adds a constant to all scores of a query, so its gradient is only rounding error.
            (gradients[name] - p.grad).abs().max() / (highest if "key.bias" in name else p.grad.abs().max())
            for name, p in theirs.named_parameters()
        ),
    }


@pytest.mark.parametrize("attention", ["sdpa", "exact"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_our_weights_in_the_published_model_give_equal_outputs(name: str, dtype: torch.dtype, attention: str) -> None:
    differences = compare(make_config(name, attention=attention), dtype)
    assert all(differences[kind] < bound for kind, bound in BOUNDS[dtype].items()), differences


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_vocabulary_changes_nothing_and_its_columns_can_never_be_predicted(name: str) -> None:
    config = make_config(name, vocab_multiple=8)
    assert config.padded_vocab_size == 104 > config.vocab_size
    differences = compare(config, torch.float64)
    assert all(differences[kind] < bound for kind, bound in BOUNDS[torch.float64].items()), differences
    logits = our_outputs(random_model(config, ParallelContext()), make_batch(config))[0][0]
    assert (logits[..., config.vocab_size :] == float("-inf")).all()
    assert logits[..., : config.vocab_size].isfinite().all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", ["gelu", "layer_norm_eps"])
def test_the_other_published_variant_is_detected(name: str, change: str) -> None:
    default = make_config(name)
    other = {
        "gelu": {"tanh": "erf", "erf": "tanh"}[default.gelu_form],
        "layer_norm_eps": {1e-5: 1e-12, 1e-12: 1e-5}[default.norm_eps],
    }[change]
    assert compare(make_config(name, **{change: other}), torch.float64)["logits"] > 1e-7


@pytest.mark.parametrize("name", ["BertForPreTraining", "MegatronBertForPreTraining"])
def test_padding_does_not_change_real_positions(name: str) -> None:
    config = make_config(name)
    model, batch = random_model(config, ParallelContext()), make_batch(config)
    before = our_outputs(model, batch)
    padding = ~batch["attention_mask"]
    batch["tokens"][padding] = (batch["tokens"][padding] + 1) % config.vocab_size
    after = our_outputs(model, batch)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0][0][~padding], after[0][0][~padding])
    assert not torch.equal(before[0][0][padding], after[0][0][padding])
