"""Finetuning on MNLI, QQP, SQuAD and RACE: readers, features, heads, training, predictions (section 5.3)."""
