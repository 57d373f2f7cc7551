"""Checkpoints of safetensors files and JSON metadata, written by all ranks and readable at any layout; no pickle.

Read metadata.py (the format), tensor_file.py, host_copies.py and write.py; then find.py, checkpoint.py (one of them,
opened) and model_tensors.py (what it must have); then offline.py, reshard.py and atomic_folder.py (conversion by one
process). No collectives: ranks coordinate through files.
"""

from .checkpoint import Checkpoint, CheckpointReader, model_differences
from .errors import CheckpointError, CheckpointVersionError
from .find import checkpoint_name, checkpoint_step, find_given, latest_checkpoint, list_checkpoints
from .metadata import METADATA, CheckpointMetadata, TensorEntry
from .offline import write_offline
from .tokenizer_files import TOKENIZER_FOLDER
from .write import CheckpointWriter, Share, divide_tensors, remove_checkpoint, remove_unfinished, set_aside
