"""In a process of its own: the peak memory of each conversion and of loading a shard, above what a tiny one leaves.

Prints JSON: {"export", "import", "reshard", "load": bytes}.
"""

import json
import sys
from pathlib import Path

import torch

from lmscale.checkpoint import Checkpoint, CheckpointMetadata, TensorEntry, write_offline
from lmscale.checkpoint.reshard import reshard
from lmscale.config import TransformerConfig
from lmscale.hugging_face.conversion import export_hugging_face, import_hugging_face
from lmscale.models import build_model
from lmscale.parallel import ParallelContext


def memory_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(field)


def save(folder: Path, config: TransformerConfig) -> Path:
    """Weights of about their usual size, one tensor at a time."""
    parameters = dict(build_model(config, ParallelContext(), seed=None, device="meta").named_parameters())
    entries = {
        f"model/{name}": TensorEntry(p.shard.full_shape, torch.float32, p.shard.shard_dim)
        for name, p in parameters.items()
    }
    metadata = CheckpointMetadata(1, {"tp_size": 2, "dp_size": 1}, config.to_dict(), entries, {}, {}, {}, {})
    generator = torch.Generator().manual_seed(1)
    tensors = ((key, torch.randn(entry.shape, generator=generator) * 0.02) for key, entry in sorted(entries.items()))
    return write_offline(folder, metadata, 2, tensors)


def load_shard(path: Path, config: TransformerConfig) -> None:
    """Read what rank 0 of 2 holds."""
    model = build_model(config, ParallelContext(0, 2), seed=None)
    with Checkpoint.open(path).reader() as reader:
        for name, param in model.named_parameters():
            reader.read_into(f"model/{name}", param.data)


def convert_all(folder: Path, config: TransformerConfig) -> dict[str, int]:
    source = save(folder / "ours", config)
    steps = {
        "export": lambda: export_hugging_face(source, folder / "published", max_file_bytes=10**8),
        "import": lambda: import_hugging_face(folder / "published", folder / "imported", 4, config.vocab_multiple),
        "reshard": lambda: reshard(source, folder / "resharded", 4),
        "load": lambda: load_shard(next((folder / "resharded").glob("*.ckpt")), config),
    }
    peaks = {}
    for name, step in steps.items():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is in memory now
        before = memory_bytes("VmRSS")
        step()
        peaks[name] = memory_bytes("VmHWM") - before
    return peaks


if __name__ == "__main__":
    sizes = json.loads(sys.argv[2])
    tiny = sizes | {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    convert_all(Path(sys.argv[1]) / "tiny", TransformerConfig(**tiny))  # what is imported and allocated only once
    print(json.dumps(convert_all(Path(sys.argv[1]), TransformerConfig(**sizes))))
