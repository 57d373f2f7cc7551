"""Our training step beside those of others, on the same work; knows Lightning and transformers, never Hydra."""
