"""The size of a model, without torch; every rule about which sizes must divide which is here.

Legend used in all docstrings of the project: b batch, s sequence, h hidden, n heads, d head size (h / n), v padded
vocabulary, L layers, p tensor-parallel size.
"""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from ..partition import stage_layers
from .checks import AboveZero, Checked, Fraction, Positive, check, refuse, require
from .family import Family, family_of, load

FLOAT8_MULTIPLE = 16  # the sides of a float8 product on a GPU
BASES = ("base_hidden_size", "base_num_layers", "base_head_size")
Attention = Literal["sdpa", "flash", "efficient", "cudnn", "flash3", "exact"]
WITHOUT_DROPOUT = ("cudnn", "flash3")  # attentions whose kernel has no dropout that can be used, and no mask
# What the backward pass recomputes instead of keeping in memory (section 4.2, activation checkpointing). `none` keeps
# everything; `selective` recomputes the GELU and, unless a GPU's fused kernel computes it, the attention core, which
# cost little and communicate nothing; `full` keeps one [b, s, h] tensor per layer, as the paper does.
Recompute = Literal["none", "selective", "full"]
RECOMPUTE_MODES: tuple[Recompute, ...] = get_args(Recompute)  # the least first


_FAMILY_IN_FILES = "architecture"  # the name of `family` in checkpoints, records and run folders


def to_file(model: dict) -> dict:
    """The keys of a model as files have them, which call its family `architecture`, as the first checkpoints did."""
    return {_FAMILY_IN_FILES if key == "family" else key: value for key, value in model.items()}


def from_file(model: dict) -> dict:
    """The keys of a model as the fields of `TransformerConfig`, from a file or from the user."""
    return {"family" if key == _FAMILY_IN_FILES else key: value for key, value in model.items()}


@cache
def _placements() -> dict[str, Any]:
    return load("lmscale.models.later_placements:PLACEMENTS")


def _parametrizations() -> dict[str, Any]:
    return load("lmscale.models.parametrization:PARAMETRIZATIONS")


@dataclass(frozen=True)
class ModelConfig(Checked):
    """`model=`: the architecture as requested, independent of how it is cut over devices; `resolve` completes it.

    Args:
        family: a folder of `lmscale.models`, `gpt` (causal) or `bert` (bidirectional, with pooler, masked-LM and
            sentence-order heads), or `package.module` of a family elsewhere; see `family_of`.
        num_layers: transformer layers (L).
        hidden_size: width of the model (h).
        num_attention_heads: attention heads (n) per layer; must divide `hidden_size`.
        vocab_size: token ids of input and output; None: the tokenizer's. The weight's further rows are zero and never
            predicted.
        vocab_multiple: the weight's rows are padded to a multiple of this at every layout, so that checkpoints do not
            depend on `tp_size`; 1,024 in the paper, 1: none.
        max_position_embeddings: longest sequence in tokens.
        ffn_hidden_size: width of the MLP; None means 4 h, the paper's.
        norm_order: where LayerNorms and residuals stand: `pre` (Figure 7 b), `post` (Figure 7 a) or a later placement
            of `models/later_placements.py`.
        layer_norm_eps: None: the published value, 1e-12 for `post` and what extends it (`deepnorm`, `b2t`), 1e-5
            elsewhere.
        gelu: `tanh` as in GPT-2 or `erf` as in BERT; None: that of the family.
        qk_norm: a LayerNorm over each head's queries and one over its keys, shared by the heads.
        hidden_dropout: probability of dropping an element of a sublayer's output.
        attention_dropout: probability of dropping an attention probability.
        embedding_dropout: probability of dropping an element of the embedding sum; None means `hidden_dropout`.
        initializer: weights are drawn by torch's `generator` on the host, or by a `counter` on their own device, which
            is faster for a large model.
        initializer_std: weights are drawn from N(0, std) (section 4.2).
        scale_residual_init: divide the initial output weights of sublayers by sqrt(2 L) (section 4.2); `deepnorm` has
            its own factor.
        parametrization: how weights, rates and multipliers follow the size (`models/parametrization.py`): as the paper
            (`standard`), with a best learning rate that stays as the width grows (`mup`), or also as the depth grows
            (`completep`, pre-norm only; `completep_unpublished`, for studies at other placements).
        base_hidden_size: width at which the parametrization equals `standard`; None: the model's own.
        base_num_layers: depth at which it does (`completep`); None: the model's own.
        base_head_size: head size at which it does; None: the model's own.
        attention: torch's fused kernels (`sdpa`), one of them first (`flash`, `efficient`), plain softmax whose dropout
            does not depend on the layout (`exact`), or the fastest of these by measurement (`auto`). A causal model in
            a half type without attention dropout can have cuDNN's kernel (`cudnn`) or FlashAttention-3's (`flash3`,
            package `flash_attn_interface`) and no other.
        recompute: activation checkpointing; `auto`: as little as fits in memory.
        name: label used in the names of runs; ignored in comparisons.

    Raises:
        ValueError: a size that is not positive, heads that do not divide the hidden size, an unknown choice.

    Source: sections 2.2, 4.2 and 5, Tables 1, 2 and 4; Figure 7.
    """

    family: str
    num_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    vocab_size: Positive | None
    max_position_embeddings: Positive
    vocab_multiple: Positive = 1024
    ffn_hidden_size: Positive | None = None
    norm_order: str = "pre"
    layer_norm_eps: AboveZero | None = None
    gelu: Literal["tanh", "erf"] | None = None
    qk_norm: bool = False
    hidden_dropout: Fraction = 0.1
    attention_dropout: Fraction = 0.1
    embedding_dropout: Fraction | None = None
    initializer: Literal["generator", "counter"] = "generator"
    initializer_std: AboveZero = 0.02
    scale_residual_init: bool = True
    parametrization: str = "standard"
    base_hidden_size: Positive | None = None
    base_num_layers: Positive | None = None
    base_head_size: Positive | None = None
    attention: Attention | Literal["auto"] = "sdpa"
    recompute: Recompute | Literal["auto"] = "none"
    name: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        family_of(self.family)
        super().__post_init__()
        check(Literal[*_placements()], self.norm_order, "norm_order")
        check(Literal[*_parametrizations()], self.parametrization, "parametrization")
        if self.attention in WITHOUT_DROPOUT:
            rule = f"0 with attention={self.attention}, because its kernel is used without dropout"
            require(self, "attention_dropout", rule, self.attention_dropout == 0)
            rule = f"sdpa, flash, efficient, exact or auto with family={self.family}, which has masks"
            require(self, "attention", rule, self.traits.is_causal)
        rules = _parametrizations()[self.parametrization]
        for name in BASES if self.parametrization == "standard" else () if rules.scales_depth else ("base_num_layers",):
            require(self, name, f"null with parametrization={self.parametrization}", getattr(self, name) is None)
        orders = rules.norm_orders or (self.norm_order,)
        rule = f"{' or '.join(orders)} with parametrization={self.parametrization}, which was published for it alone"
        require(self, "norm_order", rule, self.norm_order in orders)
        rule = f"a multiple of `num_attention_heads` ({self.num_attention_heads})"
        require(self, "hidden_size", rule, self.hidden_size % self.num_attention_heads == 0)

    def resolve(self, vocab_size: int, attention: str = "sdpa", recompute: Recompute = "none") -> "TransformerConfig":
        """This model with the given values where it leaves the choice: a null vocabulary size, an `auto`."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        values["vocab_size"] = self.vocab_size or vocab_size
        for name, value in (("attention", attention), ("recompute", recompute)):
            values[name] = value if values[name] == "auto" else values[name]
        return TransformerConfig(**values)

    @property
    def traits(self) -> Family:
        """What the model's family says of its code and sizes."""
        return family_of(self.family)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding (v): `vocab_size` rounded up to `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def ffn_size(self) -> int:
        """Width of the MLP, 4 h unless `ffn_hidden_size` is set."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def head_size(self) -> int:
        """d = h / n."""
        return self.hidden_size // self.num_attention_heads

    @property
    def placement(self) -> Any:
        """The `NormPlacement` of `norm_order`."""
        return _placements()[self.norm_order]

    @property
    def scaling(self) -> Any:
        """The rules of `parametrization` for this size (`models/parametrization.py`)."""
        return _parametrizations()[self.parametrization](self)

    @property
    def norm_eps(self) -> float:
        """LayerNorm's epsilon: 1e-12 in the original BERT (post), 1e-5 in Megatron-LM (pre), unless set."""
        return self.placement.eps if self.layer_norm_eps is None else self.layer_norm_eps

    @property
    def gelu_form(self) -> str:
        """`tanh` for GPT-2, `erf` for BERT, unless set."""
        return self.gelu or self.traits.gelu

    @property
    def input_dropout(self) -> float:
        """Dropout of the embedding sum: `embedding_dropout`, or `hidden_dropout` if that is None."""
        return self.hidden_dropout if self.embedding_dropout is None else self.embedding_dropout

    def as_standard(self) -> "ModelConfig":
        """This architecture with the standard parametrization."""
        return dataclasses.replace(self, parametrization="standard", **dict.fromkeys(BASES))

    def padded_heads(self, tp_size: int) -> int:
        """Heads that `tp_size` ranks compute together: n rounded up to a multiple; those beyond n are dummies."""
        return -(-self.num_attention_heads // tp_size) * tp_size

    def padded_width(self, tp_size: int) -> int:
        """Width of all `padded_heads`: h, and d for each dummy."""
        return self.padded_heads(tp_size) * self.head_size

    def stages(self, pp_size: int) -> tuple[range, ...]:
        """The layers of each of `pp_size` stages of a pipeline (`partition.stage_layers`)."""
        h = self.hidden_size
        layer = 4 * h**2 + 2 * h * self.ffn_size + 2 * self.max_position_embeddings * h  # multiply-adds per token
        head = 0 if self.vocab_size is None else self.traits.scored_share * h * self.padded_vocab_size
        return stage_layers(self.num_layers, pp_size, head / layer)

    def describe_stages(self, pp_size: int) -> str:
        """How many stages have how many layers: "2 x 6 + 1 x 4"."""
        return " + ".join(f"{count} x {size}" for size, count in Counter(map(len, self.stages(pp_size))).items())

    def check_stages(self, pp_size: int) -> None:
        """Refuse more stages than layers.

        Raises:
            ValueError: `pp_size` is above `num_layers`, or the family does not say how to cut its model.
        """
        if pp_size > self.num_layers:
            refuse("pp_size", f"at most `num_layers` ({self.num_layers})", pp_size)
        if pp_size > 1 and self.traits.transformer_inputs is None:
            refuse("pp_size", f"1 for the family {self.family}, which does not set `transformer_inputs`", pp_size)

    def tensor_parallel_sizes(self, pad_heads: bool = False) -> list[int]:
        """Every `tp_size` that cuts this model into equal shards, ascending; see `check_tensor_parallel`."""
        rows = self.vocab_multiple if self.vocab_size is None else self.padded_vocab_size
        common = math.gcd(0 if pad_heads else self.num_attention_heads, self.ffn_size, rows)
        return [n for n in range(1, common + 1) if common % n == 0]

    def check_tensor_parallel(self, tp_size: int, pad_heads: bool = False) -> None:
        """Refuse a `tp_size` that cannot cut this model into equal shards.

        Args:
            pad_heads: see `Layout`; then any `tp_size` divides the `padded_heads`.

        Raises:
            ValueError: names the first of heads, MLP width and (if known) vocabulary rows that `tp_size` does not
                divide, and the sizes that divide all; for heads also the key, where padding them is enough.
        """
        sizes = self.tensor_parallel_sizes(pad_heads)
        if tp_size in sizes:
            return
        rule, valid = f"a multiple of `tp_size` ({tp_size})", f"valid sizes: {', '.join(map(str, sizes))}"
        heads = self.padded_heads(tp_size) if pad_heads else self.num_attention_heads
        if heads % tp_size:
            way_out = ""
            if tp_size in self.tensor_parallel_sizes(pad_heads=True):
                way_out = f", which a run with `parallel.pad_heads=true` pads to {self.padded_heads(tp_size)}"
            refuse("num_attention_heads", rule, heads, f"{way_out}; {valid}")
        if self.ffn_size % tp_size:
            refuse("ffn_hidden_size", rule, self.ffn_size, f"; {valid}")
        if self.vocab_size is not None:
            raise ValueError(
                f"`vocab_multiple` must pad the vocabulary to a multiple of `tp_size` ({tp_size}) rows, "
                f"but {self.vocab_multiple} pads it to {self.padded_vocab_size}; {valid}"
            )

    def check_float8(self, tp_size: int) -> None:
        """Refuse sizes that float8 products on a GPU do not take: sides that are not a multiple of 16 on each rank.

        Raises:
            ValueError: names hidden size or MLP width.
        """
        of_heads = self.padded_width(tp_size)
        padded = f" ({of_heads} with dummy heads)" if of_heads > self.hidden_size else ""
        for name, text, sides in (
            ("hidden_size", f"{self.hidden_size}{padded}", (self.hidden_size, of_heads // tp_size)),
            ("ffn_hidden_size", str(self.ffn_size), (self.ffn_size // tp_size,)),
        ):
            if any(side % FLOAT8_MULTIPLE for side in sides):
                multiple = f"{FLOAT8_MULTIPLE} x tp_size ({tp_size})"
                raise ValueError(f"`{name}` must be a multiple of {multiple} with precision=fp8, but is {text}")

    def to_dict(self) -> dict:
        """Plain values without the name, ready for JSON (`to_file`); `from_dict` gives an equal config back."""
        return {key: value for key, value in to_file(dataclasses.asdict(self)).items() if key != "name"}


def require_positions(run: Any) -> None:
    """Refuse sequences that are longer than the positions of the model.

    Raises:
        ValueError: `data.seq_length` is above `model.max_position_embeddings`.
    """
    positions = run.model.max_position_embeddings
    rule = f"at most `model.max_position_embeddings` ({positions})"
    require(run, "data.seq_length", rule, run.data.seq_length <= positions)


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """The architecture of one model, with every choice made: what a model is built from and a checkpoint keeps.

    Args:
        vocab_size: number of token ids of the model's input and output.
        attention: as in `ModelConfig`, but not `auto`.
        recompute: activation checkpointing.

    Raises:
        ValueError: an invalid value, a vocabulary size that is not known, or an `auto`.
    """

    vocab_size: Positive
    attention: Attention = "sdpa"
    recompute: Recompute = "none"

    @classmethod
    def from_dict(cls, values: dict) -> "TransformerConfig":
        """The config of `to_dict`'s values.

        Raises:
            TypeError: an unknown or missing key.
            ValueError: an invalid value.
        """
        return cls(**from_file(values))
