"""The description of RoBERTa, without torch."""

from lmscale.config.family import Family, HeadSizes
from lmscale.models.bert.family import FAMILY as BERT


def _parameters(h: int, v: int) -> list[tuple[str, int, bool]]:
    return [("masked-LM head", v, True), *(("masked-LM head", size, False) for size in (h * h, h, h, h))]


FAMILY = Family(
    model="third_family.roberta.model:RoBERTa",
    loss="third_family.roberta.loss",
    samples="third_family.roberta.samples:RoBERTaDataset",
    corpus=BERT.corpus,
    is_causal=False,
    gelu="erf",
    transformer_inputs=("tokens", "attention_mask"),
    scored_share=BERT.scored_share,
    num_sample_tensors=3,
    head=HeadSizes(_parameters, multiply_adds=lambda h: (h * h, 0), num_tensors=3, num_norms=1),
)
