"""lmscale: the Megatron-LM study (arXiv:1909.08053), re-implemented with Lightning and Hydra."""

__version__ = "0.1.0"
