"""Kind of a finetuning's record: the paper's experiment, or a scaled-down one."""

from collections.abc import Mapping

from ..config import TransformerConfig
from ..config.finetune import FinetuneConfig
from ..paper import BERT_SIZES

# Number of examples of the published sets of Table 5.
SCORED = {
    "mnli": {"matched": 9_815, "mismatched": 9_832},
    "qqp": {"dev": 40_430},
    "squad_v1": {"dev": 10_570},
    "squad_v2": {"dev": 11_873},
    "race": {"test": 4_934},
}
# Number of examples of the published training sets; some copies of QQP lack unreadable rows.
TRAINED = {"mnli": 392_702, "qqp": 363_846, "squad_v1": 87_599, "squad_v2": 130_319, "race": 87_866}
_MISSING = 0.001  # fraction of them that may be missing


def record_kind(
    run: FinetuneConfig, model: TransformerConfig, num_examples: Mapping[str, int], num_trained: int | None
) -> tuple[str, str | None]:
    """Return the kind of a run's record, and the paper's name of the model's size.

    Args:
        num_examples: scored examples by set.
        num_trained: examples of the training set; None if a finetuned checkpoint is only scored, whose own record
            describes its training.

    Returns:
        `run` if size, norm order and parametrization are those of Table 4 and the sets are the complete sets of Table
        5, otherwise `scaled_down`; and the name of the size, None if the paper has none.
    """
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads)
    size = next((name for name, paper in BERT_SIZES.items() if paper == shape), None)
    if run.task.name not in SCORED:
        return "scaled_down", size
    whole = all(num_examples.get(name) == count for name, count in SCORED[run.task.name].items())
    trimmed = run.from_scratch or run.trainer.max_train_examples is not None
    trimmed |= num_trained is not None and num_trained < (1 - _MISSING) * TRAINED[run.task.name]
    as_in_paper = (model.norm_order, model.parametrization) == ("pre", "standard")
    is_run = size is not None and as_in_paper and whole and not trimmed
    return "run" if is_run else "scaled_down", size
