"""Pretraining with Lightning: strategy, modules, optimizer, checkpoints, launching. Never sees Hydra."""
