"""Evaluation of trained models: perplexity, cloze accuracy, minimal pairs and text generation.

Read loading.py; zero_shot_job.py with task.py, wikitext103.py, lambada.py, blimp.py and scoring.py (zero-shot
evaluation); generate_job.py with prompts.py, generation.py and sampling.py.
"""
