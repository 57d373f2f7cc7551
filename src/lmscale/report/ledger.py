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


# The columns of Table 5 as metrics of a finetuning's record. All but RACE's are of the development set.
TABLE_5_METRICS = {
    "mnli/accuracy_matched": "MNLI matched, accuracy, %",
    "mnli/accuracy_mismatched": "MNLI mismatched, accuracy, %",
    "qqp/accuracy": "QQP accuracy, %",
    "squad_v1/f1": "SQuAD 1.1 F1, %",
    "squad_v1/exact_match": "SQuAD 1.1 exact match, %",
    "squad_v2/f1": "SQuAD 2.0 F1, %",
    "squad_v2/exact_match": "SQuAD 2.0 exact match, %",
    "race/accuracy_test": "RACE test accuracy, %",
    "race/accuracy_middle_test": "RACE test, middle school, %",
    "race/accuracy_high_test": "RACE test, high school, %",
}


@dataclass(frozen=True)
class BERTModel:
    """A row of Tables 4 and 5.

    Args:
        size: layers, hidden size, heads; None for models of others and for ensembles.
        table_5: in the order of `TABLE_5_METRICS`; None where nothing is printed.
    """

    size: tuple[int, int, int] | None
    table_5: tuple[float | None, ...]


BERT_MODELS = {
    "336M": BERTModel((24, 1024, 16), (89.7, 90.0, 92.3, 94.2, 88.0, 88.1, 84.8, 83.0, 86.9, 81.5)),
    "1.3B": BERTModel((24, 2048, 32), (90.9, 91.0, 92.6, 94.9, 89.1, 90.2, 87.1, 87.3, 90.4, 86.1)),
    "3.9B": BERTModel((48, 2560, 40), (91.4, 91.4, 92.7, 95.5, 90.0, 91.2, 88.5, 89.5, 91.8, 88.6)),
    "3.9B ensemble": BERTModel(None, (None, None, None, 95.8, 90.5, 91.7, 89.0, 90.9, 93.1, 90.0)),
    "RoBERTa": BERTModel(None, (90.2, 90.2, 92.2, 94.6, 88.9, 89.4, 86.5, 83.2, 86.5, 81.8)),
    "ALBERT": BERTModel(None, (90.8, None, 92.2, 94.8, 89.3, 90.2, 87.4, 86.5, 89.0, 85.0)),
    "XLNet": BERTModel(None, (90.8, 90.8, 92.3, 95.1, 89.7, 90.6, 87.9, 85.4, 88.6, 84.0)),
    "ALBERT ensemble": BERTModel(None, (None, None, None, 95.5, 90.1, 91.4, 88.9, 89.4, 91.2, 88.6)),
}
