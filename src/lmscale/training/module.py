"""The Lightning modules: `Trainer(strategy=TensorParallelStrategy(...)).fit(GPTModule(config), data)`."""

from .step.module import PretrainModule


class GPTModule(PretrainModule):
    """Next-token prediction (section 5.2): the loss of `models/gpt/loss.py`."""


class BERTModule(PretrainModule):
    """Masked tokens and sentence order (section 5.3): the loss of `models/bert/loss.py`."""
