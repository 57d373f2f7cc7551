"""BERT and GPT from one tensor-parallel transformer layer; torch and `parallel` only, no collective of its own."""

from .bert import BERT, scored_positions
from .build import build_model, count_model_parameters
from .gpt import GPT

__all__ = ["BERT", "GPT", "build_model", "count_model_parameters", "scored_positions"]
