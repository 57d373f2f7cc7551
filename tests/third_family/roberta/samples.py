"""BERT's samples without the inputs of sentence order prediction."""

import numpy as np

from lmscale.data.bert_dataset import BERTDataset


class RoBERTaDataset(BERTDataset):
    """Tokens, masks and labels."""

    def batch(self, epochs: np.ndarray, indices: np.ndarray) -> dict[str, np.ndarray]:
        """As BERT's, without token types and order labels."""
        found = super().batch(epochs, indices)
        return {key: found[key] for key in ("tokens", "attention_mask", "labels")}
