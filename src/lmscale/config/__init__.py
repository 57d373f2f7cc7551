"""Every dataclass of every entry point, typed from YAML to use; imports no torch."""

from .layout import BatchConfig, Layout
from .model import RECOMPUTE_MODES, Recompute, TransformerConfig
