"""Do two folders hold the same model? Ours and transformers' own code, part by part on the same input.

Each side is a model with one layer and few words on the meta device. A part's weights are read when it is its turn,
as fp64 (rounding is then 1e-15 instead of 1e-7, and a wrong epsilon or GELU stands out), and dropped before the other
side reads its own: memory holds one layer in fp64, however deep the model is. Nothing here uses the table of names
that the conversion uses; names inside a side are its own. One tensor escapes: the bias of the keys adds the same to
all scores of a query, which softmax ignores.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..config import TransformerConfig
from ..config.family import family_of
from ..models import build_model
from ..models.hugging_face import ComparedHead
from ..parallel import ParallelContext
from .errors import CheckpointError
from .hf_config import small_hf_model
from .hf_files import HuggingFaceReader
from .read import CheckpointReader
from .reshard import VOCABULARY

_log = logging.getLogger(__name__)
# Of the largest output value. Equal weights in different code differ by about 1e-14; GELU's other form by 1e-4.
BOUND = 1e-9
_SEQUENCE = 64  # tokens that go through the layers
_CHUNK_ROWS = 1024  # of the vocabulary at a time, at least


class _Side:
    """A small model whose parameters get their values for a while.

    Args:
        read: (full name, None or rows [first, last)) -> the tensor, fp64.
        layers: name of the list of layers.
        by_row: parameters that have a row for each word.
    """

    def __init__(self, model: nn.Module, read: Callable, layers: str, by_row: set[str]) -> None:
        self.model, self.read, self.layers, self.by_row = model.eval(), read, layers, by_row

    @contextmanager
    def weights(self, *prefixes: str, layer: int = 0, rows: tuple[int, int] | None = None) -> Iterator[None]:
        """Parameters whose names begin like this have their values inside the block."""
        loaded = []
        for name, param in list(self.model.named_parameters(remove_duplicate=False)):
            if name.startswith(prefixes):
                source = name.replace(f"{self.layers}.0.", f"{self.layers}.{layer}.")
                value = self.read(source, rows if name in self.by_row else None)
                owner, _, leaf = name.rpartition(".")
                loaded.append((self.model.get_submodule(owner), leaf, param))
                setattr(*loaded[-1][:2], nn.Parameter(value, requires_grad=False))
        assert loaded or not prefixes, prefixes
        try:
            yield
        finally:
            for owner, leaf, param in loaded:
                setattr(owner, leaf, param)


class _Ours(_Side):
    def __init__(
        self, reader: CheckpointReader, config: TransformerConfig, num_rows: int, rounded_to: torch.dtype | None
    ) -> None:
        def read(name: str, rows: tuple[int, int] | None) -> Tensor:
            key = f"model/{name}"
            tensor = reader.read(key) if rows is None else reader.read_rows(key, *rows)
            return (tensor if rounded_to is None else tensor.to(rounded_to)).double()

        small = replace(config, num_layers=1, vocab_size=num_rows, vocab_multiple=1)
        model = build_model(small, ParallelContext(), seed=None, device="meta")
        super().__init__(model, read, "transformer.layers", set(VOCABULARY))
        self.has_final_norm = hasattr(model.transformer, "final_norm")

    def embed(self, chunks: list[tuple[int, int]], ids: list[Tensor], types: Tensor | None) -> Iterator[Tensor]:
        transformer = self.model.transformer
        others = ("transformer.position_embedding", "transformer.token_type_embedding", "transformer.embedding_norm")
        with self.weights(*others):
            for chunk, tokens in zip(chunks, ids, strict=True):
                with self.weights("transformer.word_embedding", rows=chunk):
                    yield transformer.embed(tokens, None if types is None else types.expand_as(tokens), None)

    def layer(self, index: int, x: Tensor) -> Tensor:
        with self.weights("transformer.layers", layer=index):
            return self.model.transformer.layers[0](x, None, None)

    def final_norm(self, x: Tensor) -> Tensor:
        with self.weights("transformer.final_norm"):
            return self.model.transformer.final_norm(x)

    def head(self, head: ComparedHead, x: Tensor) -> Tensor:
        with self.weights(head.ours):
            return head.run_ours(self.model, x)

    def logits(self, x: Tensor, chunks: list[tuple[int, int]]) -> Iterator[Tensor]:
        names = {name for name, _ in self.model.named_parameters()}
        by_row = self.by_row & names
        with self.weights(*sorted(name for name in names - by_row if name.startswith("lm_head."))):
            for chunk in chunks:
                with self.weights(*by_row, rows=chunk):
                    yield self.model.logits(x)


class _Theirs(_Side):
    def __init__(self, reader: HuggingFaceReader, num_rows: int) -> None:
        self.about = about = reader.model

        def read(name: str, rows: tuple[int, int] | None) -> Tensor:
            return reader.read(about.aliases.get(name, name), *(rows or (0, None))).double()

        by_row = {f"{about.words}.weight"} | set(about.aliases)
        super().__init__(small_hf_model(reader.values, about, num_rows), read, about.layers, by_row)
        self.heads = [head for head in about.heads if any(name.startswith(head.theirs) for name in reader.names())]
        self.scores_words = all(row.theirs in reader.names() for row in about.outer if row.ours.startswith("lm_head."))

    def embed(self, chunks: list[tuple[int, int]], ids: list[Tensor], types: Tensor | None) -> Iterator[Tensor]:
        with self.weights(*self.about.embeddings):
            for chunk, tokens in zip(chunks, ids, strict=True):
                positions = torch.arange(tokens.shape[1]).expand_as(tokens)
                with self.weights(self.about.words, rows=chunk):
                    yield self.about.embed(
                        self.model, tokens, None if types is None else types.expand_as(tokens), positions
                    )

    def layer(self, index: int, x: Tensor) -> Tensor:
        mask = None
        if self.about.masks_layers:
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        with self.weights(self.layers, layer=index):
            output = self.model.get_submodule(f"{self.layers}.0")(x, attention_mask=mask)
        return output[0] if isinstance(output, tuple) else output

    def final_norm(self, x: Tensor) -> Tensor:
        with self.weights(self.about.final_norm):
            return self.model.get_submodule(self.about.final_norm)(x)

    def head(self, head: ComparedHead, x: Tensor) -> Tensor:
        with self.weights(head.theirs):
            return head.run_theirs(self.model, x)

    def logits(self, x: Tensor, chunks: list[tuple[int, int]]) -> Iterator[Tensor]:
        with self.weights(*self.about.head):
            for chunk in chunks:
                with self.weights(self.about.head_by_row, rows=chunk):
                    yield self.about.score(self.model, x)


@torch.inference_mode()
def compare_models(
    ours: CheckpointReader,
    theirs: HuggingFaceReader,
    config: TransformerConfig,
    rounded_to: torch.dtype | None = None,
) -> None:
    """Compare embeddings (every word and position), layer by layer, and the heads (every word) that both have.

    Args:
        rounded_to: type that the weights of ours were rounded to on the way. They are rounded here too, so that one
            bound serves all types; it is the conversion that is tested, not the type.

    Raises:
        CheckpointError: a part differs by more than `BOUND`, or has an output that is not finite.
    """
    positions, vocab = config.max_position_embeddings, config.vocab_size
    num_rows = positions * -(-_CHUNK_ROWS // positions)
    chunks = [(first, min(first + num_rows, vocab)) for first in range(0, vocab, num_rows)]
    # Every row of a chunk at least once, every position in each row of ids.
    ids = [torch.arange(num_rows).clamp(max=last - first - 1).view(-1, positions) for first, last in chunks]
    num_types = family_of(config.family).num_token_types
    types = (torch.arange(positions) % num_types)[None] if num_types else None
    left, right = _Ours(ours, config, num_rows, rounded_to), _Theirs(theirs, num_rows)

    found: list[tuple[float, str]] = []  # differences and their parts
    middle = len(chunks) // 2  # the first words of a vocabulary are often never used
    for i, (a, b) in enumerate(zip(left.embed(chunks, ids, types), right.embed(chunks, ids, types), strict=True)):
        _check("the embeddings", a, b, found)
        if i == middle:
            x = a[:1, :_SEQUENCE].clone()
    for index in range(config.num_layers):
        a, b = left.layer(index, x), right.layer(index, x)
        _check(f"layer {index}", a, b, found)
        x = a
    if left.has_final_norm:
        a, b = left.final_norm(x), right.final_norm(x)
        _check("the last LayerNorm", a, b, found)
        x = a
    for head in right.heads:
        _check(head.part, left.head(head, x), right.head(head, x), found)
    if right.scores_words:
        for a, b in zip(left.logits(x, chunks), right.logits(x, chunks), strict=True):
            _check("the language-model head", a, b, found)
    _log.info("compared with transformers: at most %.1e apart (%s; allowed %.0e)", *max(found), BOUND)


def _check(part: str, ours: Tensor, theirs: Tensor, found: list[tuple[float, str]]) -> None:
    scale = ours.abs().max().item()
    difference = (ours - theirs).abs().max().item() / max(scale, torch.finfo(torch.float64).tiny)
    if not difference <= BOUND:  # also where it is not a number
        raise CheckpointError(
            f"the converted model does not compute the same: {part} differs by {difference:.1e} of its largest value "
            f"(allowed {BOUND:.0e}); nothing was kept"
        )
    found.append((difference, part))
