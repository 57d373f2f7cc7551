"""A run's weights and moments, saved and loaded at every pair of layouts: bitwise equal."""

import itertools
import threading
from pathlib import Path

import pytest
import torch
from runs import tiny_run

from lmscale.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    TensorEntry,
    divide_tensors,
    find_damage,
    list_checkpoints,
    read_metadata,
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
