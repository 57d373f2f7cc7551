"""BERT, described without torch."""

from ...config.family import CorpusForm, Family, HeadSizes

MASKED_SHARE = 0.15  # of the tokens, at most (Devlin et al. 2018)


def _parameters(h: int, v: int) -> list[tuple[str, int, bool]]:
    sizes = [("pooler", h * h, False), ("pooler", h, False), ("masked-LM head", v, True)]
    sizes += [("masked-LM head", size, False) for size in (h * h, h, h, h)]
    return sizes + [("sentence-order head", 2 * h, False), ("sentence-order head", 2, False)]


FAMILY = Family(
    model="lmscale.models.bert.model:BERT",
    loss="lmscale.models.bert.loss",
    samples="lmscale.data.bert_dataset:make_samples",
    corpus=CorpusForm(
        name="bert",
        sequence="sentence",
        tokenizer="bert",
        hub_name="google-bert/bert-large-uncased",
        algorithm="wordpiece",
        token_roles={f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")},
    ),
    is_causal=False,
    gelu="erf",
    transformer_inputs=("tokens", "token_types", "attention_mask"),
    loss_inputs=("labels", "sop_labels"),
    num_token_types=2,  # sentence A and sentence B
    has_pooler=True,
    scored_share=MASKED_SHARE,
    num_sample_tensors=4,
    head=HeadSizes(
        parameters=_parameters,
        multiply_adds=lambda h: (h * h, h * h + 2 * h),  # masked-LM dense; pooler and sentence order
        num_tensors=3,
        num_norms=1,
    ),
    hugging_face="lmscale.models.bert.hugging_face",
)
