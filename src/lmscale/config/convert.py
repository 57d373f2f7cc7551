"""The configuration of a conversion: the typed form of `conf/convert.yaml`."""

from dataclasses import dataclass, fields
from typing import Literal

from .checks import AboveZero, PathText, Positive, Seed, require
from .from_dict import EntryConfig

# By format; an lmscale checkpoint always holds the exact weights.
KEYS_OF = {
    "lmscale": ("tp_size", "vocab_multiple", "initialize_missing_heads"),
    "hugging_face": ("dtype", "max_file_gb"),
}


@dataclass(frozen=True)
class ConvertConfig(EntryConfig):
    """One conversion of a checkpoint.

    Args:
        source: a checkpoint of lmscale, a run folder (its newest one), or a folder with a Hugging Face model.
        target: a folder that does not exist yet.
        format: of the target.
        tp_size: tensor ranks of an lmscale target.
        vocab_multiple: padding of an lmscale target; None: the source's (1,024 for Hugging Face).
        dtype: of the weights in a Hugging Face target.
        max_file_gb: largest weight file of a Hugging Face target, in GB (10^9 bytes).
        tokenizer_path: tokenizer files to copy beside the model; None: those of the source, if any.
        initialize_missing_heads: initialize heads that a Hugging Face source lacks, instead of refusing it.
        seed: of the initialized heads.

    Raises:
        ValueError: an invalid value.
    """

    source: PathText
    target: PathText
    format: Literal["lmscale", "hugging_face"] = "lmscale"
    tp_size: Positive = 1
    vocab_multiple: Positive | None = None
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    max_file_gb: AboveZero = 5.0
    tokenizer_path: PathText | None = None
    initialize_missing_heads: bool = False
    seed: Seed = 1234

    def check_rules(self) -> None:
        foreign = {name for form, names in KEYS_OF.items() if form != self.format for name in names}
        for each in fields(self):
            is_set = each.name in foreign and getattr(self, each.name) != each.default
            require(self, each.name, f"left alone with format={self.format}", not is_set)
