"""The paper's numbers, each typed once; `entries` gives every one its id, its command and our evidence.

Source: arXiv:1909.08053v4, the table or section named at each. What the scaling study measured is in `scaling`, because
the cost model's fit needs it there.
"""

from dataclasses import dataclass

PRINTED, READ_OFF, INFERRED = "printed", "read off the figure", "inferred"
RECONSTRUCTED = "reconstructed: our source's table is garbled"
BLOG = "printed in NVIDIA's blog post of 2019, not in the paper"

PAPER_STEPS = 300_000  # section 5.2: iterations of each GPT
GPT_VOCABULARY, BERT_VOCABULARY = 50_257, 30_522  # ids: sections 5.1 and 4.2
SEQ_LENGTH = 1024  # tokens of a GPT's sequence: section 4.2
NUM_SEEDS = 5  # section 5.3: the median of five
DATA_RANKS = 64  # section 5.1: of every data-parallel GPT


@dataclass(frozen=True)
class StudyModel:
    """A row of Table 1.

    Args:
        size: layers, hidden size, heads.
        parameters: billions, as printed.
        tp_size: GPUs of model parallelism; `DATA_RANKS` times as many with data parallelism.
    """

    size: tuple[int, int, int]
    parameters: float
    tp_size: int


STUDY_MODELS = {
    "1.2B": StudyModel((40, 1536, 16), 1.2, 1),
    "2.5B": StudyModel((54, 1920, 20), 2.5, 2),
    "4.2B": StudyModel((64, 2304, 24), 4.2, 4),
    "8.3B": StudyModel((72, 3072, 32), 8.3, 8),
}


@dataclass(frozen=True)
class GPTModel:
    """A row of Tables 2 and 3.

    Args:
        size: layers, hidden size, heads.
        parameters: millions, as printed.
        head_size: hidden size of a head.
        num_gpus: in all.
        days: of one epoch, 68,507 iterations.
        wikitext103: perplexity, test set.
        lambada: accuracy in %.
    """

    size: tuple[int, int, int]
    parameters: int
    head_size: int
    num_gpus: int
    days: float
    wikitext103: float
    lambada: float


GPT_MODELS = {
    "355M": GPTModel((24, 1024, 16), 355, 64, 64, 0.86, wikitext103=19.31, lambada=45.18),
    "2.5B": GPTModel((54, 1920, 20), 2500, 96, 128, 2.27, wikitext103=12.76, lambada=61.73),
    "8.3B": GPTModel((72, 3072, 24), 8300, 128, 512, 2.10, wikitext103=10.81, lambada=66.51),
}
BEST_VALIDATION_PERPLEXITY = 9.27  # of 8.3B: section 5.2, Figure 6
PREVIOUS_BEST = {"wikitext103": 15.79, "lambada": 63.24}  # Table 3: Khandelwal et al. 2019; Radford et al. 2019
WIKITEXT_TEST_WORDS, WIKITEXT_TEST_TARGETS = 245_566, 270_329  # appendix E: T_o, and T with GPT-2's tokenizer


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
        token_ratio: tokens of pretraining over those of 336M (Table 5).
        parameters: millions, as printed.
        num_gpus: in all.
        steps: iterations of pretraining.
        validation: on 3 % held out; the paper says perplexity, the values are almost surely losses in nats.
    """

    size: tuple[int, int, int] | None
    table_5: tuple[float | None, ...]
    token_ratio: int | None = None
    parameters: int | None = None
    num_gpus: int | None = None
    steps: int | None = None
    validation: float | None = None


BERT_MODELS = {
    "336M": BERTModel(
        (24, 1024, 16), (89.7, 90.0, 92.3, 94.2, 88.0, 88.1, 84.8, 83.0, 86.9, 81.5), 1, 336, 128, 2_000_000, 1.58
    ),
    "1.3B": BERTModel(
        (24, 2048, 32), (90.9, 91.0, 92.6, 94.9, 89.1, 90.2, 87.1, 87.3, 90.4, 86.1), 1, 1300, 256, 2_000_000, 1.30
    ),
    "3.9B": BERTModel(
        (48, 2560, 40), (91.4, 91.4, 92.7, 95.5, 90.0, 91.2, 88.5, 89.5, 91.8, 88.6), 1, 3900, 512, 1_500_000, 1.16
    ),
    "3.9B ensemble": BERTModel(None, (None, None, None, 95.8, 90.5, 91.7, 89.0, 90.9, 93.1, 90.0)),
    "RoBERTa": BERTModel(None, (90.2, 90.2, 92.2, 94.6, 88.9, 89.4, 86.5, 83.2, 86.5, 81.8), 2),
    "ALBERT": BERTModel(None, (90.8, None, 92.2, 94.8, 89.3, 90.2, 87.4, 86.5, 89.0, 85.0), 3),
    "XLNet": BERTModel(None, (90.8, 90.8, 92.3, 95.1, 89.7, 90.6, 87.9, 85.4, 88.6, 84.0), 2),
    "ALBERT ensemble": BERTModel(None, (None, None, None, 95.5, 90.1, 91.4, 88.9, 89.4, 91.2, 88.6)),
}

# Figure 7 alone; the paper gives no sizes, these are the nearest to the count.
BERT_752M = BERTModel((36, 1280, 20), (), parameters=752)
# Figure 7 in words: model, norm order, what its curve does.
FIGURE_7 = (
    ("336M", "post", "trains"),
    ("336M", "pre", "trains, lower loss"),
    ("752M", "post", "unstable"),
    ("752M", "pre", "stable, lower loss"),
)
# Table 6 by task: batch, learning rate, epochs of 336M, 1.3B and 3.9B (there 3.8B). A reconstruction.
TABLE_6 = {
    "mnli": ((128, 1e-5, 10), (128, 1e-5, 10), (128, 1e-5, 10)),
    "qqp": ((128, 5e-5, 12), (128, 3e-5, 12), (256, 4e-5, 12)),
    "squad_v1": ((64, 3e-5, 2), (48, 3e-5, 2), (48, 1e-5, 2)),
    "squad_v2": ((48, 3e-5, 2), (64, 3e-5, 2), (48, 1e-5, 2)),
    "race": ((32, 2e-5, 3), (16, 1e-5, 3), (32, 2e-5, 3)),
}
