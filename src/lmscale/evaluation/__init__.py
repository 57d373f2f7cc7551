"""Trained models judged: perplexity, cloze accuracy, generation, classification and question answering.

Torch, `models`, `checkpoint`, `data` and `parallel`, no Lightning and no Hydra.
"""
