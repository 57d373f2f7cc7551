"""The checkpoint files: compatible with safetensors, readable at any layout, safe against damage and malice."""

import io
import os
import pickle
import re
import threading

import pytest
import torch
from checkpoints import Trap, change_metadata, flip_a_byte
from safetensors import safe_open
from safetensors.torch import save_file

from lmscale.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    CheckpointWriter,
    TensorEntry,
    divide_tensors,
    list_checkpoints,
    tensor_file,
    write_offline,
)
from lmscale.checkpoint.host_copies import HostCopies
from lmscale.checkpoint.tensor_file import TensorFileReader, TensorFileWriter
from lmscale.parallel import ParallelContext


def logical_tensors() -> dict[str, tuple[torch.Tensor, int | None]]:
    """Tensors of every shard dimension."""
    generator = torch.Generator().manual_seed(3)
    return {
        "exp_avg/rows": (torch.randn(24, 5, generator=generator), 0),
        "model/bias": (torch.randn(24, generator=generator), 0),
        "model/columns": (torch.randn(6, 16, generator=generator), 1),
        "model/half": (torch.randn(8, 8, generator=generator).bfloat16(), 1),
        "model/norm": (torch.randn(7, generator=generator).double(), None),
        "model/rows": (torch.randn(24, 5, generator=generator), 0),
    }


def metadata_of(tensors, step: int = 5) -> CheckpointMetadata:
    entries = {key: TensorEntry(tuple(t.shape), t.dtype, dim) for key, (t, dim) in tensors.items()}
    return CheckpointMetadata(step, {"tp_size": 1, "dp_size": 1}, {"num_layers": 1}, entries, {}, {}, {}, {})


def part_of(tensor: torch.Tensor, dim: int | None, rank: int, size: int) -> torch.Tensor:
    return tensor if dim is None else tensor.chunk(size, dim)[rank].contiguous()


def begin(
    folder,
    tp_rank: int,
    tp_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    in_background: bool = False,
    token: str = "t",
    timeout_s: float = 20,
) -> CheckpointWriter:
    """One rank's part of a save."""
    tensors = logical_tensors()
    metadata = metadata_of(tensors)
    writer = CheckpointWriter(token, dp_rank * tp_size + tp_rank, tp_size * dp_size, timeout_s)
    mine = {key: part_of(t, dim, tp_rank, tp_size) for key, (t, dim) in tensors.items()}
    share = divide_tensors(metadata.tensors, ParallelContext(tp_rank, tp_size, dp_rank, dp_size))
    writer.begin(folder / "step_5.ckpt", mine, metadata, share, in_background)
    return writer


def save_at(folder, tp_size: int, dp_size: int, in_background: bool = False) -> None:
    """Save as `tp_size` x `dp_size` ranks, each in its own thread."""
    errors = []

    def one_rank(tp_rank: int, dp_rank: int) -> None:
        errors.append(begin(folder, tp_rank, tp_size, dp_rank, dp_size, in_background).finish())

    threads = [threading.Thread(target=one_rank, args=(t, d)) for t in range(tp_size) for d in range(dp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None] * len(threads)


class _ShortWrites(io.FileIO):
    """The system writes less than it is given, as Linux does above 2 GiB."""

    def write(self, data: memoryview) -> int:
        return super().write(data[:7])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_files_are_interchangeable_with_the_safetensors_library(tmp_path, dtype, monkeypatch) -> None:
    monkeypatch.setattr(tensor_file, "open", lambda path, mode, buffering=0: _ShortWrites(path, mode), raising=False)
    tensors = {"a": torch.randn(3, 4).to(dtype), "b": torch.ones(5).to(dtype), "empty": torch.zeros(0, 3).to(dtype)}
    with TensorFileWriter(tmp_path / "ours", {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}) as file:
        checksums = {name: file.write(name, tensor) for name, tensor in tensors.items()}
    with safe_open(tmp_path / "ours", framework="pt") as theirs:
        assert all(torch.equal(theirs.get_tensor(name), tensor) for name, tensor in tensors.items())
    save_file(tensors, tmp_path / "theirs")
    for path in ("ours", "theirs"):
        with TensorFileReader(tmp_path / path) as file:
            assert all(torch.equal(file.read(name), tensor) for name, tensor in tensors.items())
            assert {name: file.checksum(name) for name in tensors} == checksums
            assert torch.equal(_rows(file, "a", 1, 3), tensors["a"][1:3])


def _rows(file: TensorFileReader, name: str, first: int, last: int) -> torch.Tensor:
    out = torch.empty((last - first, *file.shape(name)[1:]), dtype=file.dtype(name))
    file.read_into(name, out, first)
    return out


def test_a_tensor_out_of_order_of_another_shape_or_missing_raises(tmp_path) -> None:
    shapes = {"a": ((2,), torch.float32), "b": ((2,), torch.float32)}
    with pytest.raises(RuntimeError, match="out of order"), TensorFileWriter(tmp_path / "f", shapes) as file:
        file.write("b", torch.zeros(2))
    with pytest.raises(RuntimeError, match="must be"), TensorFileWriter(tmp_path / "f", shapes) as file:
        file.write("a", torch.zeros(3))
    with pytest.raises(RuntimeError, match="b was never written"), TensorFileWriter(tmp_path / "f", shapes) as file:
        file.write("a", torch.zeros(2))


@pytest.mark.parametrize(("tp_size", "dp_size"), [(1, 3), (4, 2)])
def test_any_layout_reads_what_any_layout_saves(tmp_path, tp_size, dp_size) -> None:
    save_at(tmp_path, tp_size, dp_size, in_background=dp_size == 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_5.ckpt"]
    (path,) = list_checkpoints(tmp_path)
    assert Checkpoint.open(path).damage() is None
    with Checkpoint.open(path).reader() as reader:
        for key, (tensor, dim) in logical_tensors().items():
            assert torch.equal(reader.read(key), tensor)
            for size in (2, 4):
                for rank in range(size):
                    shard = torch.empty_like(part_of(tensor, dim, rank, size))
                    reader.read_into(key, shard, rank)
                    assert torch.equal(shard, part_of(tensor, dim, rank, size))
            if dim in (None, 0):
                assert torch.equal(reader.read(key, 1, 4), tensor[1:4])
            wide = torch.empty_like(part_of(tensor, dim, 1, 2), dtype=torch.float64)
            reader.read_into(key, wide, 1)
            assert torch.equal(wide, part_of(tensor, dim, 1, 2).double())
    with Checkpoint.open(path).reader({key.partition("/")[2]: 4 for key in logical_tensors()}) as reader:
        for key, (tensor, dim) in logical_tensors().items():
            if dim is not None:  # the last rank has what is left of the tensor, and padding
                padded = torch.cat([tensor, torch.zeros_like(tensor.narrow(dim, 0, 4))], dim)
                shard = torch.full_like(part_of(padded, dim, 1, 2), 7)
                reader.read_into(key, shard, 1)
                assert torch.equal(shard, part_of(padded, dim, 1, 2))


def test_reading_is_on_the_cpu_whatever_the_default_device(saved) -> None:
    """Lightning reads weights with the GPU as default device."""
    expected = logical_tensors()
    with torch.device("meta"), Checkpoint.open(saved).reader() as reader:
        for key, (tensor, dim) in expected.items():
            assert torch.equal(reader.read(key), tensor)
            if tensor.ndim and dim in (None, 0):
                assert torch.equal(reader.read(key, 0, len(tensor)), tensor)


def test_ranks_write_equal_shares_and_every_tensor_once() -> None:
    entries = {f"w{i}": TensorEntry((64, 10 + i), torch.float32, 0) for i in range(12)}
    entries |= {f"n{i}": TensorEntry((64,), torch.float32, None) for i in range(16)}
    shares = {(t, d): divide_tensors(entries, ParallelContext(t, 2, d, 4)) for t in range(2) for d in range(4)}
    for key, entry in entries.items():
        places = sorted(share.places[key] for share in shares.values() if key in share.places)
        assert places == ([(0, 1)] if entry.shard_dim is None else [(0, 32), (32, 64)])
    sizes = [sum(entries[key].num_bytes for key in share.places) for share in shares.values()]
    assert max(sizes) < 1.25 * min(sizes)
    assert len({share.file for share in shares.values()}) == 8


def test_one_process_writes_the_same_checkpoint_tensor_by_tensor(tmp_path) -> None:
    tensors = logical_tensors()
    path = write_offline(tmp_path, metadata_of(tensors), 2, ((key, t) for key, (t, _) in tensors.items()))
    assert Checkpoint.open(path).damage() is None
    with Checkpoint.open(path).reader() as reader:
        assert all(torch.equal(reader.read(key), tensor) for key, (tensor, _) in tensors.items())
    with pytest.raises(FileExistsError):
        write_offline(tmp_path, metadata_of(tensors), 2, [])
    with pytest.raises(ValueError, match="`tp_size` must divide exp_avg/rows"):
        write_offline(tmp_path / "x", metadata_of(tensors), 5, [])
    with pytest.raises(RuntimeError, match="never written"):
        write_offline(tmp_path / "x", metadata_of(tensors), 2, [])
    assert list((tmp_path / "x").iterdir()) == []


@pytest.fixture
def saved(tmp_path):
    save_at(tmp_path, 2, 1)
    return tmp_path / "step_5.ckpt"


def test_every_single_byte_is_covered(saved) -> None:
    """Flip one byte at positions throughout every file: each is detected and named."""
    for file in sorted(saved.iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 61)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
            try:
                damage = Checkpoint.open(saved).damage()
            except CheckpointError as error:
                damage = str(error)
            assert damage is not None and file.name in damage, place
        file.write_bytes(whole)
    assert Checkpoint.open(saved).damage() is None


def test_a_flipped_byte_names_its_tensor(saved) -> None:
    flip_a_byte(saved / "rank_1_of_2.safetensors")
    assert Checkpoint.open(saved).damage() == "rank_1_of_2.safetensors: tensor model/rows does not match its checksum"
    assert Checkpoint.open(saved).damage(share=0, num_shares=2) is None
    assert Checkpoint.open(saved).damage(share=1, num_shares=2) is not None


def test_a_folder_of_another_kind_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint: it has no metadata.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    command = f"import it: python src/convert.py source={tmp_path} target=NEW_FOLDER"
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path} is a Hugging Face model; {command}")):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # of 2019, without a model type
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=re.escape(command)):
        Checkpoint.open(tmp_path)


def test_pickles_are_never_opened(tmp_path) -> None:
    """The `.metadata` of torch's distributed checkpoint, a byte entry of it, a `.ckpt` file, and all of them inside a
    directory that looks like one of ours."""
    trap = tmp_path / "trap"
    payload = pickle.dumps(Trap(trap))
    dcp = tmp_path / "step_1.ckpt"
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(payload)
    (dcp / "__0_0.distcp").write_bytes(payload)
    with pytest.raises(CheckpointError, match="torch.distributed.checkpoint directory, whose pickles could run code"):
        Checkpoint.open(dcp)
    lone = tmp_path / "last.ckpt"
    lone.write_bytes(payload)
    with pytest.raises(CheckpointError, match="pickled files are never read"):
        Checkpoint.open(lone)
    (dcp / "metadata.json").write_bytes(payload)
    with pytest.raises(CheckpointError, match="cannot be parsed"):
        Checkpoint.open(dcp)
    save_at(tmp_path, 1, 1)
    ours = tmp_path / "step_5.ckpt"
    (ours / ".metadata").write_bytes(payload)
    (ours / "rank_0_of_1.safetensors").write_bytes(payload)
    with pytest.raises(CheckpointError, match="rank_0_of_1.safetensors must have"):
        Checkpoint.open(ours).check_files()
    assert "must have" in Checkpoint.open(ours).damage()
    with pytest.raises(CheckpointError, match="not a safetensors file, or cut off: a header of"):
        TensorFileReader(ours / "rank_0_of_1.safetensors")
    assert not trap.exists()
    with pytest.raises(FileExistsError):  # the trap works
        trap.mkdir()
        pickle.loads(payload)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["files"].update({"../../etc/passwd": {"num_bytes": 1, "header_checksum": ""}}),
        lambda v: v["tensors"]["model/rows"]["pieces"].pop(),
        lambda v: v["tensors"]["model/rows"]["pieces"].reverse(),
        lambda v: v["tensors"]["model/rows"]["pieces"][0].update(file="/etc/passwd"),
        lambda v: v["tensors"]["model/rows"].update(shape=[10**12, 5]),
        lambda v: v["tensors"]["model/norm"].update(shape=[10**12]),
        lambda v: v["tensors"]["model/norm"].update(shape=[0, 10**30]),
        lambda v: v["tensors"]["model/rows"]["pieces"][0].update(start=0.0),
        lambda v: v["tensors"]["model/rows"].update(shard_dim=0.0),
        lambda v: v["tensors"].update({"x\ny": v["tensors"]["model/rows"] | {"shape": [-1]}}),
        lambda v: v["tensors"]["model/rows"].update(dtype="PICKLE"),
        lambda v: v["tensors"].update({"x": 3}),
        lambda v: v.pop("step"),
        lambda v: v.update(surprise=1),
        lambda v: v.update(files=[]),
    ],
)
def test_malicious_metadata_raises(saved, change) -> None:
    change_metadata(saved, change)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(saved)
    assert "\n" not in str(caught.value) and "step_5.ckpt" in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "O", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [0, 1000000000000000000000000000000], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"1, " * 99 + b'2], "data_offsets": [0, 8]}}',
        b'{"a\\nb": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b"[" * 5000,
    ],
)
def test_malicious_headers_raise(tmp_path, header) -> None:
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError) as caught:
        TensorFileReader(tmp_path / "f")
    assert len(str(caught.value).splitlines()) == 1


def test_a_type_that_is_not_known_is_named(tmp_path) -> None:
    header = b'{"w": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}'
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="must be one of F64, .*, but w is 'F8_E4M3'"):
        TensorFileReader(tmp_path / "f")


def test_metadata_nested_to_the_limit_of_recursion_raises(saved) -> None:
    for depth in range(950, 1000):
        (saved / "metadata.json").write_text('{"format_version": 2, "x": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(CheckpointError):
            Checkpoint.open(saved)


def test_a_rank_that_cannot_write_is_named_and_nothing_is_left(tmp_path, monkeypatch) -> None:
    original = TensorFileWriter.write

    def full(self, name, tensor):
        if "rank_1" in self.path.name:
            raise OSError(28, "No space left on device")
        return original(self, name, tensor)

    monkeypatch.setattr(TensorFileWriter, "write", full)
    ranks = [begin(tmp_path, rank, 2, in_background=True) for rank in (0, 1)]
    assert "rank 1" in ranks[1].finish()
    assert ranks[0].finish() == "rank 1: [Errno 28] No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_memory_for_copies_saves_before_it_goes_on(tmp_path, monkeypatch, capsys) -> None:
    def refuse(self, tensors) -> None:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(HostCopies, "copy", refuse)
        one = begin(tmp_path, 1, 2, in_background=True)
    assert len(list(tmp_path.glob(".*.unfinished/rank_1.part"))) == 1
    assert [begin(tmp_path, 0, 2, in_background=True).finish(), one.finish()] == [None, None]
    assert "WARNING: rank 1 saves step_5.ckpt without a copy, training waits: can't alloc" in capsys.readouterr().err
    assert len(list_checkpoints(tmp_path)) == 1


def test_an_error_closes_the_unfinished_files(tmp_path) -> None:
    tensors = logical_tensors()

    def one_tensor():
        yield "exp_avg/rows", tensors["exp_avg/rows"][0]
        raise CheckpointError("no more")

    before = len(os.listdir("/dev/fd"))
    with pytest.raises(CheckpointError, match="no more") as caught:
        write_offline(tmp_path, metadata_of(tensors), 2, one_tensor())
    assert len(os.listdir("/dev/fd")) == before
    assert caught.tb is not None  # which would keep open files open


def test_parts_of_an_earlier_start_are_not_taken_for_those_of_this_one(tmp_path) -> None:
    assert begin(tmp_path, 1, 2, token="killed").finish() is None
    new = begin(tmp_path, 0, 2, token="new", timeout_s=0.1)
    assert new.finish() == "rank 1 has not written its part within 0 s"
    assert list_checkpoints(tmp_path) == []


def test_a_tensor_longer_than_what_is_read_at_once_has_its_own_checksum(tmp_path, monkeypatch) -> None:
    tensors = {"long": torch.arange(50), "next": torch.ones(50)}
    with TensorFileWriter(tmp_path / "file", {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}) as file:
        written = {key: file.write(key, tensor) for key, tensor in tensors.items()}
    monkeypatch.setattr(tensor_file, "_CHUNK", 96)
    with TensorFileReader(tmp_path / "file") as file:
        assert {key: file.checksum(key) for key in tensors} == written
