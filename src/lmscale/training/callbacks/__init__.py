"""The callbacks of a pretraining, one per file."""
