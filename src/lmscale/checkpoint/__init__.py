"""Checkpoints of safetensors files and JSON metadata, written by all ranks and readable at any layout; no pickle.

Read metadata.py (the format), tensor_file.py, host_copies.py, write.py and read.py; then model_tensors.py (what
a checkpoint of a model must have), offline.py, reshard.py and atomic_folder.py (conversion by one process). No
collectives: ranks coordinate through files.
"""

from .errors import CheckpointError, CheckpointVersionError
from .metadata import (
    METADATA,
    CheckpointMetadata,
    TensorEntry,
    check_files,
    check_model,
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
    read_metadata,
)
from .offline import write_offline
from .read import CheckpointReader, find_damage
from .tokenizer_files import TOKENIZER_FOLDER
from .write import CheckpointWriter, Share, divide_tensors, remove_checkpoint, remove_unfinished, set_aside
