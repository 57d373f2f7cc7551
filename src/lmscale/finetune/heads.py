"""BERT's encoder with a task head: sequence classification, a number, multiple choice, or span."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TransformerConfig
from ..config.finetune import FinetuneConfig
from ..models import build_model
from ..models.parametrization import parametrize, scaled
from ..parallel import ParallelContext, ReplicatedLinear, counter_dropout, initialize_parameters, site_keys
from .tasks import HeadKind, benchmark_of


class FinetuneModel(nn.Module):
    """The encoder, the pooler (not for spans) and one linear layer, replicated over tensor ranks like the pooler.

    classification: dropout(tanh(pooler(hidden of [CLS]))) -> h x k
    regression:     the same with k = 1
    choice:         the same with k = 1 for each of a question's c sequences; softmax over the c sequences
    span:           hidden of every token -> h x 2, logits of first and last token of the answer; padding is -inf

    Parameters are named as in `BERT` (`transformer.`, `pooler.`); the linear layer is `head.`.

    Shapes:
        tokens, token_types int64 [b, s]; attention_mask bool [b, s] or None; sample_keys int32 [b], needed in training
        with dropout. Returns [b, k], [b/c, c] or [b, 2, s]; fp32 for half types.

    Communicates:
        over the tensor group, only within the transformer.

    Source: section 5.3; Devlin et al. 2018, section 4; Megatron-LM v1.0 for the dropout before the layer.
    """

    def __init__(self, bert: nn.Module, kind: HeadKind, num_outputs: int, head_dropout: float) -> None:
        super().__init__()
        config: TransformerConfig = bert.transformer.config
        self.kind, self.num_outputs, self.head_dropout = kind, num_outputs, head_dropout
        self.dropout_site = 1 + 3 * config.num_layers  # after those of the embedding and of every layer
        self.transformer = bert.transformer
        # A micro-batch is padded to its longest item, so its length depends on the layout.
        for layer in bert.transformer.layers:
            layer.attention.rows_per_head = config.max_position_embeddings
        if kind is not HeadKind.SPAN:
            self.pooler = bert.pooler
        width = 1 if kind is HeadKind.CHOICE else num_outputs
        self.head = ReplicatedLinear(config.hidden_size, width, bert.context, config.initializer_std, role="readout")
        parametrize(self.head, config)
        self.output_factor = config.scaling.output_factor

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor,
        attention_mask: Tensor | None = None,
        sample_keys: Tensor | None = None,
    ) -> Tensor:
        hidden = self.transformer(tokens, token_types, attention_mask, sample_keys)
        if self.kind is HeadKind.SPAN:
            logits = _wide(self.head(scaled(hidden, self.output_factor))).transpose(1, 2)  # [b, 2, s]
            return logits if attention_mask is None else logits.masked_fill(~attention_mask[:, None], -torch.inf)
        pooled = self.pooler(hidden[:, 0]).tanh()
        if self.training and self.head_dropout > 0.0:
            keys = site_keys(sample_keys, self.dropout_site + 1)[-1]
            pooled = counter_dropout(pooled[:, None], self.head_dropout, keys)[:, 0]
        logits = _wide(self.head(scaled(pooled, self.output_factor)))
        return logits.view(-1, self.num_outputs) if self.kind is HeadKind.CHOICE else logits

    def item_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross-entropy of each item in nats, [items]; for spans the mean over first and last token, for
        numbers the squared error.

        Shapes:
            logits as `forward` returns them; labels int64 [items], for spans [items, 2], for numbers fp64 [items].
        """
        if self.kind is HeadKind.REGRESSION:
            return F.mse_loss(logits[:, 0], labels.to(logits.dtype), reduction="none")
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return losses.view(-1, 2).mean(dim=1) if self.kind is HeadKind.SPAN else losses


def build_finetune_model(
    run: FinetuneConfig, config: TransformerConfig, context: ParallelContext, dtype: torch.dtype, device: torch.device
) -> FinetuneModel:
    """Build this rank's shard of a model for finetuning.

    Args:
        run: its seed initializes the head, the encoder with `from_scratch`, and the pooler with `new_pooler`; all other
            parameters are uninitialized, to be loaded from a checkpoint.
        config: of the checkpoint's model, with the run's dropout.

    Raises:
        ValueError: `tp_size` does not divide the model.
    """
    benchmark = benchmark_of(run.task)
    dropout = config.hidden_dropout if run.head_dropout is None else run.head_dropout
    bert = build_model(config, context, seed=run.seed if run.from_scratch else None, dtype=dtype, device=device)
    with torch.device(device):
        model = FinetuneModel(bert, benchmark.head, benchmark.num_outputs, dropout)
    model.head.to(dtype)
    drawn = {"head": model.head}
    if run.new_pooler and benchmark.head is not HeadKind.SPAN:
        drawn["pooler"] = model.pooler
    initialize_parameters(nn.ModuleDict(drawn), run.seed, context)  # initialization depends on a parameter's full name
    return model


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
