"""GPT's samples: windows over the documents laid end to end."""

import numpy as np

from .prepare import PreparedCorpus


class GPTDataset:
    """Packed windows of s + 1 tokens that overlap by one, so that every token but the first is predicted once.

    Documents stand in the corpus's order, each closed by end-of-text; which window comes when is the sampler's
    business.

    Args:
        prepared: a corpus prepared for `gpt`.
        split: `train` or `validation`.
        seq_length: s, tokens of a sample.

    Raises:
        ValueError: the split is shorter than one window.

    Source: section 4.2 and Megatron-LM's GPT dataset (anchors: documents and end-of-text, windows overlapping by one).
    """

    def __init__(self, prepared: PreparedCorpus, split: str, seq_length: int) -> None:
        self.tokens = prepared.array(split, "tokens")
        self.seq_length = seq_length
        if len(self) == 0:
            raise ValueError(
                f"the {split} part must have at least `data.seq_length` + 1 ({seq_length + 1}) tokens, "
                f"but has {len(self.tokens)}"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_length

    def sample(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Window `index`: tokens and, shifted by one, labels.

        Shapes:
            tokens, labels int64 [s].
        """
        start = index * self.seq_length
        window = np.asarray(self.tokens[start : start + self.seq_length + 1], dtype=np.int64)
        return {"tokens": window[:-1], "labels": window[1:]}
