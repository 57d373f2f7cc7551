"""GPT, described without torch."""

from ...config.family import CorpusForm, Family

FAMILY = Family(
    model="lmscale.models.gpt.model:GPT",
    loss="lmscale.models.gpt.loss",
    samples="lmscale.data.gpt_dataset:make_samples",
    corpus=CorpusForm(
        name="gpt",
        sequence="document",
        tokenizer="gpt2",
        hub_name="openai-community/gpt2",
        algorithm="bpe",
        token_roles=dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    ),
    is_causal=True,
    gelu="tanh",
    transformer_inputs=("tokens",),
    hugging_face="lmscale.models.gpt.hugging_face",
)
