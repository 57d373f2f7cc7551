"""Pretraining BERT: masked language model and sentence order."""

from .family_module import FamilyModule


class BERTModule(FamilyModule):
    """Loss: cross-entropy of the masked tokens plus that of the sentence order (section 5.3); see
    `models/bert/loss.py`."""
