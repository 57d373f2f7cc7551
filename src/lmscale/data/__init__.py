"""Token files to training samples in a reproducible order; knows neither models nor layouts beyond the data rank.

Read sources.py, tokenizer/ and prepare.py (text to token files in the cache) or indexed_corpus.py (existing token
files), indexed_dataset.py and indexed_writer.py (the file format); then gpt_index.py and gpt_dataset.py, bert_index.py
and bert_dataset.py (samples); then permutation.py, sampler.py and datamodule.py (their order and batches).
"""
