"""Pretraining GPT: next-token prediction."""

from .family_module import FamilyModule


class GPTModule(FamilyModule):
    """Loss: cross-entropy of the next token (section 5.2); see `models/gpt/loss.py`."""
