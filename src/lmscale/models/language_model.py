"""The base class of all families: the transformer, and heads that the family adds."""

from torch import nn

from ..config import TransformerConfig
from ..config.family import load
from ..parallel import ParallelContext, initialize_parameters
from .parametrization import parametrize
from .transformer import Transformer

DEFAULT_SEED = 1234  # of a model built without a context


class LanguageModel(nn.Module):
    """A transformer with its heads on this rank; `build_model` builds one in a different dtype, or compiled.

    Args:
        config: sizes.
        context: this rank's place; weights are then left uninitialized. None: one process, with weights drawn from
            `DEFAULT_SEED`, so that `GPT(config)(tokens)` works alone.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext | None = None) -> None:
        super().__init__()
        if not isinstance(self, load(config.traits.model)):
            raise ValueError(f"`family` must be that of a {type(self).__name__}, but is {config.family!r}")
        self.config, self.context = config, ParallelContext() if context is None else context
        self.compiles = False
        self.transformer = Transformer(config, self.context)
        if self.context.is_last_stage:
            self.add_heads()
        parametrize(self, config)
        if context is None:
            initialize_parameters(self, DEFAULT_SEED, self.context, config.initializer)

    def add_heads(self) -> None:
        """Create the modules after the transformer; none by default."""

    def compile_layers(self, cuda_graphs: bool = False) -> None:
        """Let torch.compile fuse the layers (one graph for all) and the passes over the logits; names do not change.

        Args:
            cuda_graphs: record the layers on a GPU and replay them.
        """
        self.compiles = True
        self.transformer.compile_layers(cuda_graphs)
