"""Finetuning on MNLI, QQP, SQuAD, RACE and user tables: data, heads, training, predictions (section 5.3).

Read finetuning.py and module.py (the run and its step) with initial_checkpoint.py and heads.py; tasks/, examples.py,
sources.py, pairs.py, windows.py, features.py and preparing.py (rows to model inputs); batches.py; answers.py,
scoring.py with squad_score.py, outputs.py and ensembling.py (logits to metrics); protocol.py (several runs).
"""
