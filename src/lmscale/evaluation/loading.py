"""What an evaluation needs to know of a trained model before its ranks start."""

import torch

from ..config import TransformerConfig
from ..config.data import TokenizerConfig
from ..config.generate import GenerateConfig, GenerateTokenizer
from ..config.zero_shot import ZeroShotConfig
from ..data.tokenizer import Tokenizer, choose_tokenizer, load_published_tokenizer
from ..trained_model import describe_checkpoint, load_saved_tokenizer

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_model(
    config: GenerateConfig | ZeroShotConfig, needs_causal: bool = True, checks_ranks: bool = True
) -> tuple[TransformerConfig, Tokenizer]:
    """Return the model configuration and the tokenizer of an evaluation; of the weights only the sizes are read.

    Args:
        needs_causal: refuse a model that does not predict the next token.
        checks_ranks: check also that the ranks of the configuration can run the model.

    Raises:
        ValueError: the checkpoint is missing, damaged or of another family, or `tp_size` does not divide it; the
            tokenizer is missing or not the model's; or there is no GPU.
    """
    requested = load_requested_tokenizer(config.tokenizer)
    model, folder = describe_checkpoint(config.ckpt)
    if needs_causal and not model.traits.is_causal:
        kind = model.family.upper()
        raise ValueError(
            f"`ckpt` must be a GPT, which predicts the next token, but {config.ckpt} is a {kind}; finetune/run.py "
            "takes a BERT's"
        )
    if checks_ranks:
        model.check_tensor_parallel(config.parallel.tp_size, config.parallel.pad_heads)
        if config.accelerator == "gpu" and not torch.cuda.is_available():
            raise ValueError("`accelerator` must be cpu or auto on a machine without a GPU, but is gpu")
    return model, choose_tokenizer(requested, load_saved_tokenizer(folder, model), model, config.ckpt)


def load_requested_tokenizer(config: GenerateTokenizer) -> Tokenizer | None:
    """Load the tokenizer of `tokenizer=` and `tokenizer.path=`; None if neither is given.

    Raises:
        ValueError: a file is missing or unreadable.
    """
    if config.kind is None and config.path is None:
        return None
    return load_published_tokenizer(TokenizerConfig("gpt2", path=config.path, name=config.name))
