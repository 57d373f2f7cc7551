"""Every dataclass of every entry point, typed from YAML to use; imports no torch."""

from .layout import BatchConfig, ParallelConfig
from .model import NormOrder, Recompute, TransformerConfig

__all__ = ["BatchConfig", "NormOrder", "ParallelConfig", "Recompute", "TransformerConfig"]
