"""Corpora, tokenizers, samples and their order. Knows nothing of models or layouts beyond the data rank."""
