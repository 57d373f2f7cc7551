"""Evaluation of trained models: perplexity, cloze accuracy and text generation.

Read loading.py; zero_shot_job.py with zero_shot_task.py, windows.py, perplexity.py, lambada.py and cloze.py (zero-shot
evaluation); generate_job.py with prompts.py, generation.py and sampling.py.
"""
