"""Do two folders hold the same model? Ours and transformers' own code, on the same input.

Each side is a model with one layer, and a part of the words and of the positions, on the meta device. For every layer
in turn it computes all of its outputs with that layer, the next part of the words and the next part of the positions,
read as fp64 (rounding is then 1e-15 instead of 1e-7, and a wrong epsilon or GELU stands out). One side drops its
weights before the other reads its own: memory holds one layer in fp64, however deep the model is. Nothing here uses the
table of names that the conversion uses; names inside a side are its own. One tensor escapes: the bias of the keys adds
the same to all scores of a query, which softmax ignores.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..checkpoint import CheckpointError, CheckpointReader
from ..checkpoint.model_tensors import meta_model
from ..checkpoint.reshard import VOCABULARY
from ..config import TransformerConfig
from .config import small_hf_model
from .files import HuggingFaceReader

_log = logging.getLogger(__name__)
# Of the largest output value. Equal weights in different code differ by about 1e-14; GELU's other form by 1e-4.
BOUND = 1e-9
_LEAST = 64  # words and positions of a part, for attention over several tokens


@dataclass(frozen=True)
class _Side:
    """A small model that reads its parameters whenever it runs.

    Args:
        read: of (full name) or (full name, first row, last row excluded): the tensor.
        layers: name of the list of layers.
        words, positions: parameters with a row per word, and per position.
        drawn: parameters that only one of the folders has; both sides use the same random numbers in their place.
    """

    model: nn.Module
    read: Callable[..., Tensor]
    layers: str
    words: Collection[str]
    positions: Collection[str]
    drawn: Collection[str]

    def run(self, layer: int, words: tuple[int, int], positions: tuple[int, int], inputs: dict) -> list[Tensor]:
        """Outputs of this layer and then of the model, with rows [first, last) of the words and positions."""
        weights = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            full_name = name.replace(f"{self.layers}.0.", f"{self.layers}.{layer}.")
            rows = words if name in self.words else positions if name in self.positions else ()
            if full_name in self.drawn:
                generator = torch.Generator().manual_seed(0)
                weights[name] = torch.randn(param.shape, dtype=torch.float64, generator=generator)
            else:
                weights[name] = self.read(full_name, *rows).double()
        seen: list[Any] = []
        with self.model.get_submodule(f"{self.layers}.0").register_forward_hook(lambda *call: seen.append(call[-1])):
            outputs = functional_call(self.model, weights, kwargs=inputs, tie_weights=False)
        output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        return [output, outputs] if isinstance(outputs, Tensor) else [output, *outputs]


@torch.inference_mode()
def compare_models(
    ours: CheckpointReader,
    theirs: HuggingFaceReader,
    config: TransformerConfig,
    rounded_to: torch.dtype | None = None,
    drawn: Collection[str] = (),
    build: Callable[[TransformerConfig], nn.Module] = meta_model,
) -> None:
    """Compare the outputs of both models for every layer, word and position.

    Args:
        rounded_to: type that the weights of ours were rounded to on the way. They are rounded here too, so that one
            bound serves all types; it is the conversion that is tested, not the type.
        drawn: parameters of ours that theirs lacks.
        build: our model of a configuration, on the meta device.

    Raises:
        CheckpointError: an output differs by more than `BOUND`, or is not finite.
    """
    about, num_layers = theirs.model, config.num_layers
    totals = config.vocab_size, config.max_position_embeddings
    sizes = [min(total, max(_LEAST, -(-total // num_layers))) for total in totals]  # covered by the runs
    small = replace(config, num_layers=1, vocab_size=sizes[0], vocab_multiple=1, max_position_embeddings=sizes[1])

    def read_ours(name: str, *rows: int) -> Tensor:
        tensor = ours.read(f"model/{name}", *rows)
        return tensor if rounded_to is None else tensor.to(rounded_to)

    def read_theirs(name: str, *rows: int) -> Tensor:
        return theirs.read(about.aliases.get(name, name), *rows)

    left = _Side(
        build(small).eval(), read_ours, "transformer.layers", VOCABULARY, ("transformer.position_embedding",), drawn
    )
    their_model = small_hf_model(theirs.values, about, small)
    their_names = {name for name, _ in their_model.named_parameters(remove_duplicate=False)}
    lacking = {name for name in their_names if about.aliases.get(name, name) not in theirs.names()}
    tied = {*about.aliases, *about.aliases.values()}
    right = _Side(their_model, read_theirs, about.layers, tied, (about.positions,), lacking)

    numbers = torch.arange(sizes[1])[None]
    tokens, num_types = numbers % sizes[0], config.traits.num_token_types
    types = numbers % num_types if num_types else None
    our_inputs = {"tokens": tokens} if types is None else {"tokens": tokens, "token_types": types}
    their_inputs = {"input_ids": tokens, "token_type_ids": types, "position_ids": numbers}
    if about.head is not None and about.head.has_choices:
        their_inputs = {name: value[None] for name, value in their_inputs.items()}
    found: list[tuple[float, str]] = []  # differences and their parts
    for layer in range(num_layers):
        firsts = [min(layer * size, total - size) for size, total in zip(sizes, totals, strict=True)]
        words, positions = ((first, first + size) for first, size in zip(firsts, sizes, strict=True))
        a = left.run(layer, words, positions, our_inputs)
        b = right.run(layer, words, positions, their_inputs | {"return_dict": False})
        where = f"layer {layer} with words from {words[0]} and positions from {positions[0]}"
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            part = f"output {index} of the model with {where}" if index else where
            found.append((_difference(part, one, other), f"layer {layer}"))
    _log.info("compared with transformers: at most %.1e apart (%s; allowed %.0e)", *max(found), BOUND)


def _difference(part: str, ours: Tensor, theirs: Tensor) -> float:
    scale = ours.abs().max().item()
    difference = (ours - theirs).abs().max().item() / max(scale, torch.finfo(torch.float64).tiny)
    if not difference <= BOUND:  # also where it is not a number
        raise CheckpointError(
            f"the converted model does not compute the same: {part} differs by {difference:.1e} of its largest value "
            f"(allowed {BOUND:.0e}); nothing was kept"
        )
    return difference
