"""Finetuning on MNLI, QQP, SQuAD, RACE and user tables: data, heads, training, predictions (section 5.3).

Read preparing.py (every check of a run, and its data) with initial_checkpoint.py; finetuning.py (the run on a rank),
module.py and heads.py (its step), callbacks.py (what it reports, scores and saves) and run_folder.py; tasks/,
examples.py, sources.py, pairs.py, windows.py and features.py (rows to model inputs); batches.py; answers.py,
scoring.py with squad_score.py, outputs.py and ensembling.py (logits to metrics); protocol.py (several runs).
"""
