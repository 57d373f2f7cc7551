"""Run a function of a notebook on real processes that communicate through gloo, and count what they send.

    @on_ranks(2, 4)
    def column_split(context):  # the same code on every rank; x and a are the notebook's own
        return {"Y": x @ part(a, 1, context)}

    column_split.differences(Y=x @ a)  # from one process

The first such function starts four processes; they wait for the next one and end with the notebook, also when it is
killed, fails or is interrupted. Numbers are fp64.
"""

import atexit
import dataclasses
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmscale.parallel import ParallelContext, ProcessGroupCommunicator, initialize_parameters

NUM_PROCESSES = 4
TIMEOUT_S = 60
EQUAL = 1e-12  # fp64 sums in another order differ by less
_GROUPS = ((0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3))


@dataclasses.dataclass(frozen=True)
class Event:
    """A message of a rank, or the output (backward: the input gradient) of a module.

    Args:
        phase: `forward` or `backward`.
        what: `all-reduce`, `all-gather` or `reduce-scatter`; else the module's name.
        kind: `message`, or the module's class.
        shape: of the larger of a message's input and output, or of the module's tensor.
        num_bytes: of that tensor.
    """

    phase: str
    what: str
    kind: str
    shape: tuple[int, ...]
    num_bytes: int


class CountingCommunicator(ProcessGroupCommunicator):
    """gloo, with a list of what happened on this rank."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        super().__init__(group, size)
        self.events: list[Event] = []

    def note(self, what: str, kind: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Append an event about a tensor."""
        phase = "forward" if torch._C._current_graph_task_id() < 0 else "backward"
        self.events.append(Event(phase, what, kind, tuple(shape), math.prod(shape) * dtype.itemsize))

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        """Note and perform."""
        self.note("all-reduce", "message", x.shape, x.dtype)
        return super().all_reduce(x, operation)

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Note and begin."""
        self.note("all-reduce", "message", x.shape, x.dtype)
        return super().begin_all_reduce(x)

    def begin_all_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Note and begin."""
        self.note("all-gather", "message", (self.size * len(x), *x.shape[1:]), x.dtype)
        return super().begin_all_gather(x)

    def begin_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]:
        """Note and begin."""
        self.note("reduce-scatter", "message", x.shape, x.dtype)
        return super().begin_reduce_scatter(x)


@dataclasses.dataclass(frozen=True)
class Run:
    """What every rank returned, and its events."""

    results: list[Any]
    events: list[list[Event]]

    @property
    def messages(self) -> list[Event]:
        """What rank 0 sent; every rank sends the same."""
        return [event for event in self.events[0] if event.kind == "message"]


class Runs(dict[int, Run]):
    """Runs of one function by tp_size."""

    def differences(self, **plain: Tensor) -> pd.DataFrame:
        """The largest difference between the ranks' tensors and those of one process.

        A tensor smaller than the plain one is a part of it: the parts are joined in the order of the ranks.
        """
        columns = {
            f"{size} ranks": [_difference([r[name] for r in run.results], whole) for name, whole in plain.items()]
            for size, run in self.items()
        }
        return pd.DataFrame(columns, index=pd.Index(plain, name="largest difference"))

    def messages(self) -> pd.DataFrame:
        """How many messages a rank sends, and the bytes of the tensor of each."""
        counts = {f"{size} ranks": Counter(run.messages) for size, run in self.items()}
        kinds = list(dict.fromkeys(message for run in self.values() for message in run.messages))
        rows = {
            "phase": [kind.phase for kind in kinds],
            "message": [kind.what for kind in kinds],
            "shape": [list(kind.shape) for kind in kinds],
            "bytes": [kind.num_bytes for kind in kinds],
        }
        return pd.DataFrame(rows | {name: [count[kind] for kind in kinds] for name, count in counts.items()})

    def ring_bytes(self) -> pd.DataFrame:
        """Bytes that a rank sends if a ring performs the messages: 2 (p - 1) / p of an all-reduce, half of others.

        Source: Patarasuk and Yuan 2009.
        """

        def sent(message: Event, size: int) -> float:
            return (1 + (message.what == "all-reduce")) * (size - 1) / size * message.num_bytes

        return pd.DataFrame(
            {
                f"{size} ranks": {
                    phase: sum(sent(message, size) for message in run.messages if message.phase == phase)
                    for phase in ("forward", "backward")
                }
                for size, run in self.items()
            }
        )


def _difference(parts: list[Tensor], whole: Tensor) -> str:
    if parts[0].shape != whole.shape:
        (dim,) = [d for d, (a, b) in enumerate(zip(parts[0].shape, whole.shape, strict=True)) if a != b]
        parts = [torch.cat(parts, dim)]
    difference = max((part - whole).abs().max().item() for part in parts)
    return f"< {EQUAL:.0e}" if difference < EQUAL else f"{difference:.3g}"


def on_ranks(*tp_sizes: int, dp_size: int = 1) -> Callable[[Callable], Runs]:
    """Run the decorated function at once, `function(context)` on every rank, for each tp_size; its name holds the runs.

    Raises:
        RuntimeError: a rank failed (with its traceback), or the ranks took longer than a minute. They are ended.
    """

    def run(function: Callable) -> Runs:
        return Runs({size: _processes().run(function, size, dp_size) for size in tp_sizes})

    return run


def part(x: Tensor, dim: int, context: ParallelContext) -> Tensor:
    """This rank's part of a tensor that is cut along `dim`."""
    return x.narrow(dim, context.start(x.shape[dim]), context.shard(x.shape[dim]))


def random_weights(module: nn.Module, context: ParallelContext, seed: int = 7) -> nn.Module:
    """Fill all parameters, also biases and LayerNorms, with the same logical numbers for every tp_size."""
    for param in module.parameters():
        param.shard = dataclasses.replace(param.shard, init="normal", std=0.3)
    initialize_parameters(module, seed, context)
    return module


def watch(module: nn.Module, context: ParallelContext) -> nn.Module:
    """Note the output and the input gradient of every submodule as events between the messages."""
    for name, child in module.named_modules():
        if name:

            def note(module: nn.Module, given: Any, found: Any, name: str = name) -> None:
                x = found if isinstance(found, Tensor) else given[0]  # backward: the gradients of the inputs
                context.tp_communicator.note(name, type(module).__name__, x.shape, x.dtype)

            child.register_forward_hook(note)
            child.register_full_backward_hook(note)
    return module


class _Processes:
    """Four ranks that wait for functions."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("forkserver")  # which imports torch once for all four
        spawn.set_forkserver_preload(["lmscale.models", "on_ranks"])
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(NUM_PROCESSES):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, self.folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        atexit.register(self.stop)

    def run(self, function: Callable, tp_size: int, dp_size: int) -> Run:
        """The function's results on the first tp_size x dp_size ranks."""
        try:
            task = cloudpickle.dumps((function, tp_size, dp_size))
            used = self.connections[: tp_size * dp_size]
            for connection in used:
                connection.send_bytes(task)
            answers: dict[Connection, Any] = {}
            while len(answers) < len(used):
                ready = wait([c for c in used if c not in answers], TIMEOUT_S)
                if not ready:
                    raise RuntimeError(f"{function.__name__} on {len(used)} ranks took longer than {TIMEOUT_S} s")
                for connection in ready:
                    answers[connection] = cloudpickle.loads(connection.recv_bytes())
                    if isinstance(answers[connection], str):
                        raise RuntimeError(f"rank {used.index(connection)} failed:\n{answers[connection]}")
        except BaseException:  # also an interrupt: the others may wait for a rank that has failed
            self.stop()
            raise
        results, events = zip(*(answers[connection] for connection in used), strict=True)
        return Run(list(results), list(events))

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()
        atexit.unregister(self.stop)
        _processes_of.clear()


_processes_of: dict[int, _Processes] = {}  # by the process that started them


def _processes() -> _Processes:
    return _processes_of.get(os.getpid()) or _processes_of.setdefault(os.getpid(), _Processes())


def _serve(rank: int, folder: str, connection: Connection) -> None:
    """Answer functions until the notebook ends."""
    threading.Thread(target=_end_with_the_notebook, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook's process decides what an interrupt ends
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.FileStore(os.path.join(folder, "store"), NUM_PROCESSES)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_PROCESSES, store=store, timeout=timeout)
    groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in _GROUPS}
    while True:
        function, tp_size, dp_size = cloudpickle.loads(connection.recv_bytes())
        dp_rank, tp_rank = divmod(rank, tp_size)
        tp_group = groups[tuple(range(dp_rank * tp_size, (dp_rank + 1) * tp_size))]
        communicator = CountingCommunicator(tp_group, tp_size)
        context = ParallelContext(
            tp_rank=tp_rank,
            tp_size=tp_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            tp_group=tp_group,
            dp_group=groups[tuple(range(tp_rank, tp_size * dp_size, tp_size))],
            tp_communicator=communicator,
        )
        try:
            answer: Any = _detached(function(context)), communicator.events
        except Exception:  # the notebook raises it
            answer = traceback.format_exc()
        connection.send_bytes(cloudpickle.dumps(answer))


def _detached(result: Any) -> Any:
    if isinstance(result, dict):
        return {name: _detached(value) for name, value in result.items()}
    return result.detach().clone() if isinstance(result, Tensor) else result


def _end_with_the_notebook() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
