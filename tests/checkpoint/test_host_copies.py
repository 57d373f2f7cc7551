"""Host copies of a rank's tensors; a stand-in for CUDA's runtime shows which memory is locked."""

import gc
import weakref

import pytest
import torch

from lmscale.checkpoint import TensorEntry, divide_tensors
from lmscale.checkpoint.host_copies import HostCopies
from lmscale.config import Layout, TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.memory import checkpoint_bytes
from lmscale.planner.workload import Workload

TENSORS = {
    "a": torch.arange(35, dtype=torch.bfloat16).view(5, 7),
    "b": torch.linspace(0, 1, 1100, dtype=torch.float64),
    "none": torch.empty(0, 3),
    "c": torch.tensor(3, dtype=torch.int64),
}


class Runtime:
    """The calls of CUDA's runtime that lock and unlock memory."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.num_calls = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0 and address not in self.locked
        self.locked[address] = num_bytes
        self.num_calls += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return runtime


def test_copies_are_equal_and_do_not_follow_the_tensors() -> None:
    tensors = {key: tensor.clone() for key, tensor in TENSORS.items()}
    copies = HostCopies().copy(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert copies.keys() == TENSORS.keys()
    for key, copy in copies.items():
        assert copy.dtype == TENSORS[key].dtype and torch.equal(copy, TENSORS[key])


def test_copies_of_a_gpu_lock_their_own_bytes_once(runtime) -> None:
    copies = HostCopies()
    first, second = copies.copy(TENSORS), copies.copy(TENSORS)
    assert all(first[key].data_ptr() == second[key].data_ptr() for key in first)
    (address,) = runtime.locked
    assert runtime.num_calls == 1 and first["a"].data_ptr() == address
    exact = sum(tensor.nbytes for tensor in TENSORS.values())
    assert exact <= runtime.locked[address] < exact + 64 * len(TENSORS)  # and no power of two


def test_a_larger_checkpoint_and_the_end_unlock_the_memory(runtime) -> None:
    copies = HostCopies()
    copies.copy({"a": TENSORS["a"]})  # only weights, before the first update
    copies.copy(TENSORS)
    assert runtime.num_calls == 2 and len(runtime.locked) == 1
    del copies
    gc.collect()
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked_is_used_unlocked_with_one_warning(runtime, monkeypatch, capsys) -> None:
    def refuse(code: int) -> None:
        raise RuntimeError("CUDA error: operation not permitted")

    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: 800)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: refuse(800))  # the first kernel after it
    copies = HostCopies()
    copies.copy({"a": TENSORS["a"]})
    assert torch.equal(copies.copy(TENSORS)["b"], TENSORS["b"])
    assert capsys.readouterr().err.count("WARNING: checkpoints are copied without locked memory: CUDA error") == 1


def test_a_smaller_buffer_is_freed_before_a_larger_one_is_made_which_may_fail(monkeypatch) -> None:
    copies, empty = HostCopies(), torch.empty
    copies.copy({"a": TENSORS["a"]})
    small = weakref.ref(copies._buffer)

    def make(*shape, **options):
        assert small() is None
        monkeypatch.setattr(torch, "empty", empty)
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "empty", make)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        copies.copy(TENSORS)
    assert torch.equal(copies.copy(TENSORS)["b"], TENSORS["b"])


@pytest.mark.parametrize(("tp_size", "dp_size", "half_moments"), [(4, 1, True), (2, 3, False)])
def test_the_planner_counts_what_a_rank_writes(tp_size, dp_size, half_moments) -> None:
    config = TransformerConfig("gpt", 6, 128, 8, 700, 96, vocab_multiple=64)
    model = build_model(config, ParallelContext(tp_size=tp_size), seed=None, device="meta")
    kinds = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16 if half_moments else torch.float32)
    entries = {
        f"{kind}/{name}": TensorEntry(param.shard.full_shape, dtype, param.shard.shard_dim)
        for name, param in model.named_parameters()
        for kind, dtype in (kinds | {"model": torch.float32}).items()
    }
    written = []
    for rank in range(tp_size * dp_size):
        place = ParallelContext(rank % tp_size, tp_size, rank // tp_size, dp_size)
        places = divide_tensors(entries, place).places
        cuts = {key: 1 if entries[key].shard_dim is None else tp_size for key in places}
        written.append(sum(entries[key].num_bytes // cut for key, cut in cuts.items()))
    job = Workload(config, 1, dp_size, 96, "bf16", half_moments=half_moments)
    counted = checkpoint_bytes(job, Layout(tp_size=tp_size, dp_size=dp_size))
    assert counted == pytest.approx(max(written), rel=0.05)
