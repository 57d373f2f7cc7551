"""Models of Hugging Face as our checkpoints and back, tensor by tensor, compared before they get a name.

Read config.py (`config.json`), files.py (weights), conversion.py (both ways) and compare.py (is it the same model?).
"""
