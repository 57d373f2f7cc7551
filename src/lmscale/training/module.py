"""The modules of both families: `Trainer(strategy=TensorParallelStrategy(...)).fit(GPTModule(config), data)`."""

from .bert_module import BERTModule
from .gpt_module import GPTModule

__all__ = ["BERTModule", "GPTModule"]
