"""Record what a step on fake CUDA tensors does that a GPU would refuse or wait for."""

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The results of these have a size or a value that the host must read from the device.
SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_consecutive")
INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_")
JOINS = ("stack", "cat")


class DeviceWatch(TorchDispatchMode):
    """Count operations that mix devices, and waits of the host for the device, by operation and place in lmscale.

    A copy between host and device counts as a wait unless it is `non_blocking`. A CPU tensor without dimensions is a
    number and may be mixed with CUDA tensors, but not as an index, nor joined with them. Fake tensors have no values: a
    number that is read from them is 0.

    Attributes:
        mixed, syncs: number of occurrences by (operation, place). A place is `file:function`; `autograd` where the
            operation is of a backward pass without code of lmscale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixed: Counter = Counter()
        self.syncs: Counter = Counter()
        torch.cuda.synchronize = lambda *_: self.syncs.update([("synchronize", _place())])
        torch.cuda.Event = lambda **_: SimpleNamespace(record=lambda *_: None, synchronize=self._wait_for_event)

    def _wait_for_event(self) -> None:
        self.syncs["Event.synchronize", _place()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = any(t.is_cuda for t in tensors)
        copies = name in ("_to_copy", "copy_")
        if on_gpu and not copies and any(not t.is_cuda and (t.ndim or name in INDEXES + JOINS) for t in tensors):
            self.mixed[name, _place()] += 1
        reads_mask = name in INDEXES and any(t.dtype is torch.bool for t in tree_leaves(args[1]) if t is not None)
        if on_gpu and (name in SYNCS or reads_mask):
            self.syncs[name, _place()] += 1
        if name == "_local_scalar_dense":
            return 0.0 if args[0].is_floating_point() else 0
        result = func(*args, **kwargs)
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
        if copies and waits and {t.device.type for t in (*tensors, result)} == {"cpu", "cuda"}:
            self.syncs["device to host" if result.device.type == "cpu" else "host to device", _place()] += 1
        return result


def _place() -> str:
    """`file:function` of the innermost frame in lmscale."""
    frame = sys._getframe(1)
    while frame is not None:
        before, package, file = frame.f_code.co_filename.rpartition("/lmscale/")
        if package and "/src" in before:
            return f"{file}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "autograd"
