"""The paper's numbers, each typed once. Source: arXiv:1909.08053v4, the table or section named at each."""

from dataclasses import dataclass

PAPER_STEPS = 300_000  # section 5.2: iterations of each GPT


@dataclass(frozen=True)
class GPTModel:
    """A row of Tables 2 and 3.

    Args:
        size: layers, hidden size, heads.
        wikitext103: perplexity, test set.
        lambada: accuracy in %.
    """

    size: tuple[int, int, int]
    wikitext103: float
    lambada: float


GPT_MODELS = {
    "355M": GPTModel((24, 1024, 16), wikitext103=19.31, lambada=45.18),
    "2.5B": GPTModel((54, 1920, 20), wikitext103=12.76, lambada=61.73),
    "8.3B": GPTModel((72, 3072, 24), wikitext103=10.81, lambada=66.51),
}
PREVIOUS_BEST = {"wikitext103": 15.79, "lambada": 63.24}  # Table 3: Krause et al. 2019; Radford et al. 2019
