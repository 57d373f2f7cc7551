"""Pretraining with Lightning: from the request of a run to its record. Never sees Hydra."""
