"""Constants of the paper that distinguish its runs from smaller ones: model sizes, steps, vocabularies, test files.

`analysis/ledger/paper.yaml` has every number of the paper; a test compares these constants with it.

Source: arXiv:1909.08053v4, the table or section named for each.
"""

STEPS = 300_000  # section 5.2: iterations of each GPT
SEQ_LENGTH, BERT_SEQ_LENGTH = 1024, 512  # tokens: section 4.2
GPT_VOCABULARY, BERT_VOCABULARY = 50_257, 30_522  # ids: sections 5.1 and 4.2
WIKITEXT_TEST_WORDS, WIKITEXT_TEST_TARGETS = 245_566, 270_329  # appendix E: T_o, and T with GPT-2's tokenizer
# Layers, hidden size, heads by the paper's name of the model: Tables 2 and 4.
GPT_SIZES = {"355M": (24, 1024, 16), "2.5B": (54, 1920, 20), "8.3B": (72, 3072, 24)}
BERT_SIZES = {"336M": (24, 1024, 16), "1.3B": (24, 2048, 32), "3.9B": (48, 2560, 40)}
