"""The configuration of a conversion: the typed form of `conf/convert.yaml`."""

from dataclasses import dataclass

from .checks import require_above_zero, require_one_of, require_path, require_positive, require_seed
from .from_dict import build

FORMATS = ("lmscale", "hugging_face")
DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class ConvertConfig:
    """One conversion of a checkpoint.

    Args:
        source: a checkpoint of lmscale, a run folder (its newest one), or a folder with a Hugging Face model.
        target: a folder that does not exist yet.
        format: of the target, `lmscale` or `hugging_face`.
        tp_size: tensor ranks of an lmscale target.
        vocab_multiple: padding of an lmscale target; None keeps the source's (Hugging Face has none: 1,024).
        dtype: of the weights in a Hugging Face target, `fp32`, `bf16` or `fp16`.
        max_file_gb: largest weight file of a Hugging Face target, in GB (10^9 bytes).
        tokenizer_path: folder of tokenizer files, a tokenizer.json, or a vocab.txt with the settings beside it, to copy
            next to the model; None: those of the source, if any.
        initialize_missing_heads: initialize heads that a Hugging Face source lacks, instead of refusing it.
        seed: of the initialized heads.

    Raises:
        ValueError: an invalid value.
    """

    source: str
    target: str
    format: str = "lmscale"
    tp_size: int = 1
    vocab_multiple: int | None = None
    dtype: str = "fp32"
    max_file_gb: float = 5.0
    tokenizer_path: str | None = None
    initialize_missing_heads: bool = False
    seed: int = 1234

    def __post_init__(self) -> None:
        require_path(self, "source", "target")
        require_positive(self, "tp_size")
        if self.vocab_multiple is not None:
            require_positive(self, "vocab_multiple")
        require_one_of(self, "format", FORMATS)
        require_one_of(self, "dtype", DTYPES)
        require_above_zero(self, "max_file_gb")
        require_seed(self)
        # Keys of the other format; an lmscale checkpoint always holds the exact weights.
        ours = {"tp_size": 1, "vocab_multiple": None, "initialize_missing_heads": False}
        theirs = {"dtype": "fp32", "max_file_gb": 5.0}
        for name, default in (ours if self.format == "hugging_face" else theirs).items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"`{name}` must be left alone with format={self.format}, but is {getattr(self, name)!r}"
                )

    @classmethod
    def from_dict(cls, values: dict) -> "ConvertConfig":
        """Build from plain values; `run_dir` and `overrides`, which the entry point adds, are not part of a conversion.

        Raises:
            ValueError: an unknown key, a missing one or a value of a different type.
        """
        return build(cls, {key: value for key, value in values.items() if key not in ("run_dir", "overrides")}, "")
