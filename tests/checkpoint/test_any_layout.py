"""A run's weights and moments, saved and loaded at every pair of layouts: bitwise equal, with little memory."""

import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from runs import tiny_run

from lmscale.checkpoint import (
    CheckpointMetadata,
    CheckpointReader,
    CheckpointWriter,
    TensorEntry,
    divide_tensors,
    find_damage,
    list_checkpoints,
    read_metadata,
    write_offline,
)
from lmscale.config import TransformerConfig
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, padding_of
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve
from lmscale.training.step.optimizer import MixedPrecisionAdamW

LAYOUTS = [(1, 1), (2, 2), (4, 1), (3, 1)]  # 4 heads: at tp 3 two, two and only dummies
_BUILDING = threading.Lock()  # building a model sets torch's default dtype, which is global


@pytest.fixture(scope="module", params=[("gpt", "bf16"), ("bert", "fp32")], ids=["gpt bf16", "bert fp32"])
def trained(request, tmp_path_factory) -> Path:
    """Three steps, so that the moments are not zero."""
    architecture, dtype = request.param
    folder = tmp_path_factory.mktemp(architecture)
    run = tiny_run(architecture, folder, precision__dtype=dtype, model__vocab_multiple=192)
    assert pretrain(resolve(run)) == 0
    return list_checkpoints(folder / "checkpoints")[-1]


def load_at(path: Path, context: ParallelContext, dtype: torch.dtype) -> MixedPrecisionAdamW:
    """One rank's model and optimizer as the training builds and loads them; nothing here communicates."""
    metadata = read_metadata(path)
    with _BUILDING:
        model = build_model(TransformerConfig.from_dict(metadata.model), context, seed=None, dtype=dtype)
    with CheckpointReader(path, padding_of(model)) as reader:

        def read_into(key: str, out: torch.Tensor) -> None:
            reader.read_into(key, out, context.tp_rank)

        for name, param in model.named_parameters():
            read_into(f"model/{name}", param.detach().fill_(torch.nan))
            assert param.isfinite().all(), name
        name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        optimizer = MixedPrecisionAdamW(
            model.named_parameters(), OptimizerConfig(lr=1e-3), PrecisionConfig(name), context
        )
        optimizer.load_masters(read_into)
        optimizer.load_moments(metadata.optimizer, read_into)
    optimizer.specs = {name: param.shard for name, param in model.named_parameters()}
    optimizer.padding = padding_of(model)
    return optimizer


def save_at(path: Path, source: Path, tp_size: int, dp_size: int, dtype: torch.dtype) -> None:
    """Load `source` at a layout and save it there, every rank in a thread of its own."""
    metadata = read_metadata(source)
    errors = []

    def one_rank(tp_rank: int, dp_rank: int) -> None:
        optimizer = load_at(source, ParallelContext(tp_rank, tp_size, pad_heads=True), dtype)
        tensors = optimizer.tensors()
        entries = {}
        for key, tensor in tensors.items():
            spec = optimizer.specs[key.split("/", 1)[1]]
            entries[key] = TensorEntry(spec.full_shape, tensor.dtype, spec.shard_dim)
        mine = type(metadata)(**{**vars(metadata), "tensors": entries, "files": {}})
        writer = CheckpointWriter("t", dp_rank * tp_size + tp_rank, tp_size * dp_size, timeout_s=60)
        share = divide_tensors(entries, tp_rank, tp_size, dp_rank, dp_size, padding=optimizer.padding)
        writer.begin(path, tensors, mine, share)
        errors.append(writer.finish())

    threads = [threading.Thread(target=one_rank, args=(t, d)) for t in range(tp_size) for d in range(dp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None] * len(threads)


def test_checkpoints_convert_bitwise_between_all_layouts(trained, tmp_path) -> None:
    """Each (tp, dp) to each of them, at tp 3 with dummy heads: weights, fp32 masters and both moments."""
    metadata = read_metadata(trained)
    dtype = torch.bfloat16 if metadata.run["precision"]["dtype"] == "bf16" else torch.float32
    with CheckpointReader(trained) as reader:
        original = {key: reader.read(key) for key in metadata.tensors}
    assert len({key.split("/")[0] for key in original}) == 3
    assert all(tensor.any() for key, tensor in original.items() if key.endswith("qkv.weight"))
    for tp_size, dp_size in LAYOUTS:
        save_at(tmp_path / f"{tp_size}_{dp_size}.ckpt", trained, tp_size, dp_size, dtype)
    for first, second in itertools.product(LAYOUTS, LAYOUTS):
        source = tmp_path / f"{first[0]}_{first[1]}.ckpt"
        path = tmp_path / f"{first}_{second}.ckpt"
        save_at(path, source, *second, dtype)
        assert find_damage(path, read_metadata(path)) is None
        with CheckpointReader(path) as reader:
            assert reader.metadata.tensors.keys() == original.keys()
            for key, tensor in original.items():
                assert torch.equal(reader.read(key), tensor), (key, first, second)


_LOAD = """
import json, sys
from pathlib import Path
import torch
sys.path[:0] = json.loads(sys.argv[2])
from lmscale.parallel import ParallelContext
import test_any_layout, peak_memory

path = Path(sys.argv[1])
test_any_layout.load_at(path / "tiny" / "step_1.ckpt", ParallelContext(0, 2), torch.float32)  # imports, allocator
Path("/proc/self/clear_refs").write_text("5")
before = peak_memory.memory_bytes("VmRSS")
optimizer = test_any_layout.load_at(path / "step_1.ckpt", ParallelContext(0, 2), torch.float32)
print(json.dumps([peak_memory.memory_bytes("VmHWM") - before, sum(t.nbytes for t in optimizer.tensors().values())]))
"""


def save_large(folder: Path, config: TransformerConfig, tp_size: int) -> CheckpointMetadata:
    """Weights and moments of a model, made up one tensor at a time."""
    parameters = dict(build_model(config, ParallelContext(), seed=None, device="meta").named_parameters())
    entries = {
        f"{kind}/{name}": TensorEntry(p.shard.full_shape, torch.float32, p.shard.shard_dim)
        for kind in ("exp_avg", "exp_avg_sq", "model")
        for name, p in parameters.items()
    }
    counters = {"num_updates": 1, "num_skipped": 0, "skipped_in_a_row": 0, "loss_scale": None}
    layout = {"tp_size": tp_size, "dp_size": 1}
    metadata = CheckpointMetadata(1, layout, config.to_dict(), entries, {}, counters, {}, {})
    tensors = ((key, torch.full(entry.shape, 0.02)) for key, entry in sorted(entries.items()))
    write_offline(folder, metadata, tp_size, tensors)
    return metadata


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.slow
def test_loading_a_shard_needs_little_more_memory_than_the_shard(tmp_path) -> None:
    """Rank 0 of 2 reads its weights and moments from a checkpoint of one rank: peak below 1.3 shards and a tensor."""
    sizes = {"family": "gpt", "num_layers": 6, "hidden_size": 768, "num_attention_heads": 12}
    sizes |= {"vocab_size": 8000, "max_position_embeddings": 512}
    large = save_large(tmp_path, TransformerConfig(**sizes), 1)
    save_large(tmp_path / "tiny", TransformerConfig(**(sizes | {"num_layers": 1, "hidden_size": 48})), 1)
    tests = Path(__file__).parent
    folders = [str(tests), str(tests.parent), str(tests.parent / "training")]
    command = [sys.executable, "-c", _LOAD, str(tmp_path), json.dumps(folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    peak, shard = json.loads(done.stdout)
    tensor = max(entry.num_bytes for entry in large.tensors.values())
    print(f"peak {peak / 1e6:.0f} MB, shard {shard / 1e6:.0f} MB, largest tensor {tensor / 1e6:.0f} MB")
    assert shard > 250e6 and peak < 1.3 * shard + tensor
