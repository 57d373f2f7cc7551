"""From raw corpora to binary token files: reading, cleaning, deduplication, removal of test sets, tokenization."""
