"""The three heads against transformers' own, and over tensor ranks against one process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from finetuning import make_task
from ranks import make_context, run_ranks
from sharding import COMPLETEP, small_config

from lmscale.config import TransformerConfig
from lmscale.finetune.heads import FinetuneModel, HeadKind, build_finetune_model
from lmscale.parallel import ParallelContext, counter_keep_mask, sample_dropout_keys, site_keys

KINDS = list(HeadKind)
TASKS = {
    HeadKind.CLASSIFICATION: "mnli",
    HeadKind.REGRESSION: "stsb",
    HeadKind.CHOICE: "race",
    HeadKind.SPAN: "squad_v1",
}
OUTPUTS = {HeadKind.CLASSIFICATION: 3, HeadKind.REGRESSION: 1, HeadKind.CHOICE: 4, HeadKind.SPAN: 2}


def small(norm_order: str, **changes) -> TransformerConfig:
    sizes = {"vocab_size": 61, "vocab_multiple": 64, "max_position_embeddings": 19}
    return small_config("bert", norm_order=norm_order, **sizes | changes)


def build(config, kind, context=None, head_dropout=0.0) -> FinetuneModel:
    run = SimpleNamespace(
        task=make_task(TASKS[kind]), head_dropout=head_dropout, seed=3, from_scratch=True, new_pooler=False
    )
    model = build_finetune_model(run, config, context or ParallelContext(), torch.float64, torch.device("cpu"))
    with torch.no_grad():  # zero biases and unit norms hide mistakes
        for name, param in model.named_parameters():
            if param.shard.replicated:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                param += 0.1 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    return model


def batch(kind: HeadKind) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 61, (8, 13), generator=generator)
    mask = torch.arange(13) < torch.tensor([13, 5, 9, 2, 13, 7, 11, 3])[:, None]
    labels = torch.tensor([1, 0, 2, 1, 0, 1, 2, 2])
    numbers = torch.tensor([0.0, 5.0, 3.25, 1.5, 4.0, 2.2, 0.4, 3.8], dtype=torch.float64)
    labels = {
        HeadKind.CHOICE: torch.tensor([2, 0]),
        HeadKind.CLASSIFICATION: labels,
        HeadKind.REGRESSION: numbers,
    }.get(kind)
    if labels is None:
        labels = torch.tensor([[3, 5], [1, 4], [0, 0], [1, 1], [12, 12], [2, 6], [0, 0], [1, 2]])
    types = (torch.arange(13) > torch.tensor([4, 1, 6, 0, 11, 2, 5, 1])[:, None]).long() * mask
    return [tokens, types, mask, labels]


def theirs(kind: HeadKind, model: FinetuneModel, config: TransformerConfig):
    """transformers' model of the kind with our weights."""
    from lmscale.hugging_face.config import config_to_hf
    from lmscale.models.hugging_face import model_of

    published = config_to_hf(config.as_standard(), "float64", {"pad_token_id": 0})
    published.num_labels, published._attn_implementation = OUTPUTS[kind], "eager"
    same = model_of(config).with_head(kind.value)
    other = getattr(transformers, same.model_class)(published).double().eval()
    state, weights = other.state_dict(), dict(model.named_parameters())
    for pair in same.pairs(config):
        if pair.ours in weights:
            state[pair.theirs].copy_(pair.to_theirs(same.fold(pair.ours, weights[pair.ours].detach(), config), config))
    return other


@pytest.mark.parametrize("norm_order, changes", [("pre", {}), ("post", {}), ("pre", COMPLETEP)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_loss_equal_those_of_transformers(kind: HeadKind, norm_order: str, changes: dict) -> None:
    config = small(norm_order, **changes)
    model = build(config, kind).eval()
    assert model.head.weight.shard.eps_factor == (0.25 if changes else 1.0)
    tokens, types, mask, labels = batch(kind)
    logits = model(tokens, types, mask)
    other = theirs(kind, model, config)
    inputs = {"input_ids": tokens, "token_type_ids": types, "attention_mask": mask.long()}
    if kind is HeadKind.CHOICE:
        inputs = {name: value.view(2, 4, 13) for name, value in inputs.items()}
    with torch.no_grad():
        targets = {"labels": labels} if kind is HeadKind.REGRESSION else {}
        found = other(**inputs, **targets)
    if kind is HeadKind.SPAN:
        for place, expected in enumerate((found.start_logits, found.end_logits)):
            assert (logits[:, place] - expected)[mask].abs().max() < 1e-12
            assert (logits[:, place][~mask] == -torch.inf).all()  # transformers includes padding
        expected_loss = (
            F.cross_entropy(found.start_logits.masked_fill(~mask, -torch.inf), labels[:, 0])
            + F.cross_entropy(found.end_logits.masked_fill(~mask, -torch.inf), labels[:, 1])
        ) / 2
    else:
        assert (logits - found.logits).abs().max() < 1e-12
        expected_loss = found.loss if kind is HeadKind.REGRESSION else F.cross_entropy(found.logits, labels)
    losses = model.item_losses(logits, labels)
    assert (losses.mean() - expected_loss).abs() < 1e-12
    assert (losses[:1] - model.item_losses(logits[:1], labels[:1])).abs() < 1e-12


def losses_and_gradients(rank: int, kind: HeadKind, norm_order: str, tp_size: int):
    config = small(norm_order, hidden_dropout=0.1, attention_dropout=0.1, attention="exact")
    model = build(config, kind, make_context(tp_size) if tp_size > 1 else None, head_dropout=0.3).train()
    tokens, types, mask, labels = batch(kind)
    keys = sample_dropout_keys(5, torch.arange(8))
    losses = model.item_losses(model(tokens, types, mask, keys), labels)
    losses.mean().backward()
    shards = {name: (param.grad, param.shard.shard_dim) for name, param in model.named_parameters()}
    return losses.detach(), shards


def all_losses_and_gradients(rank: int, tp_size: int) -> dict:
    cases = [(kind, norm_order) for kind in KINDS for norm_order in ("pre", "post")]
    return {case: losses_and_gradients(rank, *case, tp_size) for case in cases}


def test_two_tensor_ranks_match_one() -> None:
    ranks = run_ranks(all_losses_and_gradients, 2, 2)
    for case, (losses, gradients) in all_losses_and_gradients(0, 1).items():
        for found in ranks:
            assert (found[case][0] - losses).abs().max() < 1e-12, case
        for name, (whole, dim) in gradients.items():
            parts = [found[case][1][name][0] for found in ranks]
            joined = parts[0] if dim is None else torch.cat(parts, dim=dim)
            assert joined.shape == whole.shape and (joined - whole).abs().max() < 1e-12, (case, name)
            assert dim is not None or torch.equal(parts[0], parts[1]), (case, name)


def test_the_dropout_of_the_head_has_the_site_after_those_of_all_layers() -> None:
    model = build(small("pre"), HeadKind.CLASSIFICATION, head_dropout=0.5).train()
    tokens, types, mask, _ = batch(HeadKind.CLASSIFICATION)
    keys = sample_dropout_keys(5, torch.arange(8))
    pooled = model.pooler(model.transformer(tokens, types, mask, keys)[:, 0]).tanh()
    keep = counter_keep_mask(site_keys(keys, 8)[1 + 3 * 2], 1, 24, 0.5).squeeze(1)  # embedding, two layers of three
    expected = model.head(torch.where(keep, pooled / 0.5, 0.0))
    torch.testing.assert_close(model(tokens, types, mask, keys), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_padding_does_not_change_an_item(dropout) -> None:
    """The longest item of a micro-batch decides its length, so the layout does."""
    config = small("post", hidden_dropout=dropout, attention_dropout=dropout, attention="exact")
    keys = sample_dropout_keys(5, torch.arange(8))
    for kind in KINDS:
        model = build(config, kind, head_dropout=dropout).train()
        tokens, types, mask, labels = batch(kind)
        padded = [F.pad(value, (0, 4)) for value in (tokens, types, mask)]
        losses = model.item_losses(model(tokens, types, mask, keys), labels)
        assert (model.item_losses(model(*padded, keys), labels) - losses).abs().max() < 1e-12


def test_the_mask_of_attention_dropout_counts_rows_by_the_longest_sequence() -> None:
    config = small("pre", attention_dropout=0.4, attention="exact", num_attention_heads=3)
    layer = build(config, HeadKind.SPAN).train().transformer.layers[1]
    q, k, v = torch.randn(3, 2, 3, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    keys = sample_dropout_keys(1, torch.arange(2))
    whole = counter_keep_mask(keys, 3 * 19, 7, 0.4).view(2, 3, 19, 7)
    probabilities = torch.softmax(q @ k.mT / 8**0.5, dim=-1)
    expected = torch.where(whole[:, :, :7], probabilities / 0.6, 0.0) @ v
    torch.testing.assert_close(layer.attention._exact_core(q, k, v, None, keys), expected, rtol=1e-12, atol=1e-12)


def test_head_and_new_pooler_are_initialized_independently() -> None:
    task = SimpleNamespace(name="own", labels=range(24))
    run = SimpleNamespace(task=task, head_dropout=0.0, seed=3, from_scratch=False, new_pooler=True)
    model = build_finetune_model(run, small("pre"), ParallelContext(), torch.float32, torch.device("cpu"))
    head, pooler = model.head.weight.detach().flatten().numpy(), model.pooler.weight.detach().flatten().numpy()
    assert np.std(pooler) == pytest.approx(0.02, rel=0.2) and abs(np.corrcoef(head, pooler)[0, 1]) < 0.2
