"""BERT: the bidirectional model of section 5.3."""
