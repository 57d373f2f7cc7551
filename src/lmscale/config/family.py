"""What a model family is: one description that names its code by dotted path and imports no torch."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_FILES = Path(__file__).parents[1].glob("models/*/family.py")
BUILT_IN = tuple(sorted((path.parent.name for path in _FILES), reverse=True))
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # a dot at least: no single word is ever imported


@dataclass(frozen=True)
class CorpusForm:
    """How the token files of a family are written; families may share one.

    Args:
        name: `architecture` of `prepare_data.py` and of a prepared folder.
        sequence: `document` or `sentence`, what a sequence of a token file is, as in upstream's file names.
        tokenizer: the published tokenizer, `tokenizer=`.
        hub_name: its name on the Hugging Face hub.
        algorithm: `bpe` (byte-level) or `wordpiece` (uncased), of that tokenizer and of one trained on the corpus.
        token_roles: the special tokens by their role in transformers.
    """

    name: str
    sequence: str
    tokenizer: str
    hub_name: str
    algorithm: str
    token_roles: dict[str, str]

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokens whose ids the samples need."""
        return tuple(dict.fromkeys(self.token_roles.values()))

    def check_tokens(self, key: str, place: str, tokens: Collection[str]) -> None:
        """Refuse a vocabulary without the special tokens, which is mostly that of another family.

        Args:
            key: of the tokenizer in the configuration, for messages.
            place: where its files are.

        Raises:
            ValueError: a token is missing.
        """
        if lacking := [token for token in self.special_tokens if token not in tokens]:
            others = [form.name for form in corpus_forms().values() if set(form.special_tokens) <= set(tokens)]
            found = f", which suits a {others[0]}," if others else ""
            raise ValueError(
                f"`{key}` must be a tokenizer that suits a {self.name}, with {', '.join(self.special_tokens)}, but "
                f"{place}{found} lacks {', '.join(lacking)}; take that of a {self.name}"
            )


@dataclass(frozen=True)
class HeadSizes:
    """The heads besides the output projection, for the planner.

    Args:
        parameters: of (h, v): part, elements and whether the tensor is sharded, of each parameter in the model's order.
        multiply_adds: of h: those of the dense layers per scored token and per sequence, in one forward pass.
        num_tensors, num_norms: tensors [m, h] kept for the backward pass of m scored tokens, and LayerNorms over them.
    """

    parameters: Callable[[int, int], list[tuple[str, int, bool]]] = lambda h, v: []
    multiply_adds: Callable[[int], tuple[int, int]] = lambda h: (0, 0)
    num_tensors: int = 0
    num_norms: int = 0


@dataclass(frozen=True)
class Family:
    """One model family. A path is `package.module:attribute`, or `package.module` where a whole module is meant.

    Args:
        model: a class of `(config, context)` whose `transformer` is a `Transformer`.
        loss: a module with `TERMS` (by name, of what each loss is a mean; the first is that of the tokens),
            `loss_counts(batch)`, `loss_sums(model, batch, sample_keys)` and `token_logits(model, batch)`; for a teacher
            `output_projection(model, batch)`, and `loss_sums` appends the divergence from `batch["targets"]`.
        samples: a function of (prepared corpus, split, part, data config, seed, number=0, num_samples=None): `number`
            is that of the dataset in its blend; `num_samples` is what the run takes from it if it is shuffled.
        corpus: the token files it trains on.
        is_causal: a position attends to itself and those before it, and the model predicts the next token.
        gelu: `tanh` or `erf`, if `model.gelu` is null.
        transformer_inputs: entries of a micro-batch that the transformer reads, `tokens` and others, named as its
            arguments. None: the model cannot be cut into the stages of a pipeline.
        loss_inputs: entries of a batch that the loss reads besides these.
        num_token_types: rows of the token-type embedding; 0 for none.
        has_pooler: the model has a `pooler`, which finetuning heads use.
        scored_share: share of a sequence's positions whose logits a training step needs.
        num_sample_tensors: largest number of tensors int64 [s] per sample.
        head: sizes of the heads, for the planner.
        hugging_face: a module with `model_of(config)` and `MODELS`; None: transformers has no equal model.
    """

    model: str
    loss: str
    samples: str
    corpus: CorpusForm
    is_causal: bool
    gelu: str
    transformer_inputs: tuple[str, ...] | None = None
    loss_inputs: tuple[str, ...] = ("labels",)
    num_token_types: int = 0
    has_pooler: bool = False
    scored_share: float = 1.0
    num_sample_tensors: int = 2
    head: HeadSizes = HeadSizes()
    hugging_face: str | None = None


def load(path: str) -> Any:
    """Import what a dotted path names: `package.module:attribute`, or a module."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute) if attribute else import_module(module)


@cache
def family_of(name: str) -> Family:
    """The description of `model.family`.

    Args:
        name: a folder of `lmscale.models`, or `package.module`: a module with FAMILY, or a folder with family.py.

    Raises:
        ValueError: the name is neither, or its module fails to import.
    """
    if name in BUILT_IN:
        return load(f"lmscale.models.{name}.family:FAMILY")
    known = f"`family` must be one of {', '.join(BUILT_IN)}, or package.module of a module with FAMILY"
    if not isinstance(name, str) or not _MODULE_NAME.fullmatch(name):
        raise ValueError(f"{known}, but is {name!r}")
    for module in (f"{name}.family", name):
        try:
            found = getattr(import_module(module), "FAMILY", None)
        except ImportError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # something that it imports
                raise ValueError(f"{known}, but {name!r} fails to import: {error}") from None
            continue
        except (Exception, SystemExit) as error:  # the module's own code
            text = f"{type(error).__name__}: {error}"
            raise ValueError(f"{known}, but {name!r} fails to import: {text}") from None
        if isinstance(found, Family):
            return found
    raise ValueError(f"{known}, but is {name!r}")


def check_loads(name: str) -> None:
    """Import the model, the loss and the samples that a family of the user's names; they import torch.

    Raises:
        ValueError: one of them fails to load.
    """
    if name in BUILT_IN:
        return
    family = family_of(name)
    for path in (family.model, family.loss, family.samples):
        try:
            load(path)
        except (Exception, SystemExit) as error:  # the module's own code
            text = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"`model.family` must name what can be imported, but {path} of {name!r} fails: {text}"
            ) from None


@cache
def corpus_forms() -> dict[str, CorpusForm]:
    """The corpus forms of the built-in families, by their published tokenizer."""
    return {form.tokenizer: form for form in (family_of(name).corpus for name in BUILT_IN)}
