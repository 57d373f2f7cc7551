"""Pretraining with Lightning: the run from its request to its record, strategy, modules, optimizer. Never sees Hydra."""
