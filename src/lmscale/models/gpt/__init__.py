"""GPT-2: the left-to-right language model of section 5.2."""
