"""Checkpoints of a running job: which to start from, when to save, and what Lightning reads and writes."""
