"""GPTs with known predictions, and GPTs saved as our checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import torch
from sharding import small_config
from torch import nn

from lmscale.checkpoint import TOKENIZER_FOLDER, CheckpointMetadata, TensorEntry, write_offline
from lmscale.config import TransformerConfig
from lmscale.config.zero_shot import LambadaConfig
from lmscale.data.tokenizer import Tokenizer
from lmscale.evaluation.lambada import Answer, Lambada, Passage
from lmscale.models import GPT, build_model
from lmscale.parallel import ParallelContext


def zero_model(config: TransformerConfig, context: ParallelContext | None = None) -> GPT:
    """All weights are zero, so all tokens are equally probable."""
    model = build_model(config, context or ParallelContext(), seed=None, dtype=torch.float64).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model


def oracle(successor: list[int], **changes) -> GPT:
    """Knows which token follows each: the MLP of its one layer finds the token's number and writes its successor's."""
    v = len(successor)
    config = small_config("gpt", num_layers=1, vocab_size=v, vocab_multiple=1, hidden_size=v, **changes)
    model = zero_model(config)
    layer, t = model.transformer.layers[0], model.transformer
    with torch.no_grad():
        t.word_embedding.weight.copy_(torch.eye(v))
        layer.mlp_norm.weight.fill_(1.0)
        layer.mlp.up.weight[:v] = 20.0 * torch.eye(v)  # LayerNorm gives sqrt(v - 1) in one place, below 0 elsewhere
        layer.mlp.up.bias.fill_(-20.0)
        for token, follower in enumerate(successor):
            layer.mlp.down.weight[follower, token] = 1.0
        t.final_norm.weight.fill_(1e4)
    return model


def save_gpt(
    folder: Path, model: nn.Module, tokenizer: Tokenizer | None = None, tp_size: int = 1, step: int = 7
) -> Path:
    """Save a model as one of our checkpoints in fp32, with the tokenizer."""
    tensors = {f"model/{name}": param.detach().float() for name, param in model.named_parameters()}
    shards = {f"model/{name}": param.shard.shard_dim for name, param in model.named_parameters()}
    entries = {key: TensorEntry(tuple(value.shape), value.dtype, shards[key]) for key, value in tensors.items()}
    layout = {"tp_size": tp_size, "dp_size": 1}
    metadata = CheckpointMetadata(step, layout, model.config.to_dict(), entries, {}, {}, {}, {})
    path = write_offline(folder / "checkpoints", metadata, tp_size, sorted(tensors.items()))
    if tokenizer is not None:
        beside = path.parent / TOKENIZER_FOLDER
        beside.mkdir(exist_ok=True)
        tokenizer.inner.save(str(beside / "tokenizer.json"))
    return path


def lambada(passages: list[Passage], banned: Sequence[int] = (), truncate_left: bool = False) -> Lambada:
    config = LambadaConfig("lambada", "file", truncate_left=truncate_left)
    return Lambada("file", "0", "other", config, passages, banned)


def predict_last_words(model, passages: list[Passage], micro_batch_tokens: int, banned=()) -> list[Answer]:
    task = lambada(passages, banned)
    return task.answers(task.score(model, micro_batch_tokens))
