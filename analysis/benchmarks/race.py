"""Time all contenders in alternation on the same batches and compare their losses.

Each contender has a process of its own, as its users run it: what one sets (the allocator, torch's options, hooks) does
not reach the others.
"""

import multiprocessing
import statistics
import sys
import time
import traceback
from multiprocessing.connection import Connection

import numpy as np
import torch

from analysis.benchmarks.config import FILE_PEERS, BenchConfig
from lmscale.planner.flops import TERA, dense_peak_flops_per_s, model_flops_per_step
from lmscale.planner.memory import GIB
from lmscale.results import new_record
from lmscale.runtime.accelerator import resolve_accelerator
from lmscale.runtime.machine import usable_cores

from .gpu.device import clock_metrics, sampled_clocks
from .peers.contender import Contender, make_batches
from .peers.ours import Ours
from .peers.plain import HuggingFace, ModelFile

NUM_BATCHES = 4
END_S = 10.0  # for a contender that waits: it ends by itself once its pipe is closed


class LossesDifferError(ValueError):
    """The loss of a peer differs from ours; `record` has the measurements."""

    def __init__(self, message: str, record: dict) -> None:
        super().__init__(message)
        self.record = record


def race(bench: BenchConfig) -> dict:
    """Time ours and the peers in alternation (A B A B); returns the record.

    Ratios are a peer's time over ours: the ratio of the medians, and the median of the ratios within rounds, in which
    both run under the same machine load.

    Raises:
        ValueError: a peer is not available.
        LossesDifferError: a peer's loss differs from ours by more than `max_loss_difference`.
    """
    device = device_of(bench)
    set_threads(bench)
    if bench.cuda_graphs and device.type == "cpu":
        raise ValueError("`cuda_graphs` must be false on a CPU, but is true")
    names = ["ours", *bench.peers]
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    memory: dict[str, float | None] = {}
    attention: dict[str, str | None] = {}
    racers: dict[str, Racer] = {}
    try:
        for name in names:
            started = time.perf_counter()
            racers[name] = Racer(name, bench)
            racers[name].run(bench.warm_up_steps)
            print(f"{name}: warm after {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        with sampled_clocks(device) as samples:
            for _ in range(bench.rounds):
                for name, racer in racers.items():
                    taken, found, memory[name], attention[name] = racer.run(bench.steps_per_round)
                    times[name].append(taken)
                    losses[name] += found
    finally:
        for racer in racers.values():
            racer.close()
    record = _record(bench, device, times, losses, memory, attention)
    record["metrics"] |= {f"clocks/{name}": entry for name, entry in clock_metrics(samples).items()}
    ours, bound = statistics.mean(losses["ours"]), bench.max_loss_difference
    for name, found in losses.items():
        difference = abs(statistics.mean(found) / ours - 1)
        if not difference <= bound:
            message = (
                f"`max_loss_difference` must be at least {difference:.4f} for {name}, whose mean loss is "
                f"{statistics.mean(found):.4f} and ours {ours:.4f}, but is {bound}; no record is written"
            )
            raise LossesDifferError(message, record)
    return record


def device_of(bench: BenchConfig) -> torch.device:
    """The device that `accelerator` selects."""
    return torch.device("cuda" if resolve_accelerator(bench.accelerator) == "gpu" else "cpu")


def set_threads(bench: BenchConfig) -> None:
    """Set torch's number of threads and precision in this process.

    Raises:
        ValueError: more threads than cores.
    """
    if bench.num_threads is not None:
        cores = usable_cores()
        if bench.num_threads > cores:
            raise ValueError(
                f"`num_threads` must be at most the {cores} cores that this process may use, but is {bench.num_threads}"
            )
        torch.set_num_threads(bench.num_threads)
    torch.set_float32_matmul_precision("medium")


class Racer:
    """A contender in its own process, which waits while the others run.

    Raises:
        ValueError: in `run`, as the contender raises it.
        RuntimeError: in `run`, with the traceback of any other error.
    """

    def __init__(self, name: str, bench: BenchConfig) -> None:
        context = multiprocessing.get_context("forkserver")  # imports once; a fork of this process would keep threads
        context.set_forkserver_preload(["torch", "transformers"])
        self.name, (self.pipe, theirs) = name, context.Pipe()
        self.process = context.Process(target=_serve, args=(name, bench, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, num_steps: int) -> tuple[list[float], list[float], float | None, str | None]:
        """Seconds and loss of each of the next steps, peak memory of a GPU in GiB so far, and `Contender.attention`."""
        try:
            self.pipe.send(num_steps)
            found = self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join()
            raise RuntimeError(f"{self.name} ended with exit code {self.process.exitcode}") from None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the process; one that still computes is killed."""
        self.pipe.close()
        self.process.join(timeout=END_S)
        self.process.kill()
        self.process.join()


def _serve(name: str, bench: BenchConfig, pipe: Connection) -> None:
    try:
        device = device_of(bench)
        set_threads(bench)
        contender = make_contender(name, bench, device)
        batches = make_batches(bench.transformer_config(), bench, NUM_BATCHES, device)
        num_done = 0
        while True:
            times, losses = [], []
            for step in range(num_done, num_done + pipe.recv()):
                _wait(device)
                started = time.perf_counter()
                loss = contender.step(batches[step % NUM_BATCHES], step)
                _wait(device)
                times.append(time.perf_counter() - started)
                losses.append(float(loss))
            num_done += len(times)
            peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
            pipe.send((times, losses, peak, contender.attention))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return  # the other process has closed the pipe, is gone or gets the Ctrl-C too
    except ValueError as error:  # of the user
        error.add_note(traceback.format_exc())  # a pickled one has no traceback
        pipe.send(error)
    except Exception:  # may have no pickle
        pipe.send(RuntimeError(f"{name}: {traceback.format_exc()}"))


def make_contender(name: str, bench: BenchConfig, device: torch.device) -> Contender:
    """One of `ours` and `config.PEERS`.

    Raises:
        ValueError: a peer is not installed or does not support the family.
    """
    if name == "ours":
        return Ours(bench, device)
    if name in ("hf_eager", "hf_compiled"):
        return HuggingFace(bench, device, compiles=name == "hf_compiled")
    if name in FILE_PEERS:
        return ModelFile(bench, device, compiles=name == "file_compiled")
    from .peers.megatron import MegatronCore

    return MegatronCore(bench, device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(
    bench: BenchConfig,
    device: torch.device,
    times: dict[str, list[list[float]]],
    losses: dict[str, list[float]],
    memory: dict[str, float | None],
    attention: dict[str, str | None],
) -> dict:
    config = bench.transformer_config()
    name_of_device = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = dense_peak_flops_per_s(name_of_device, bench.precision.dtype, "medium")
    flops = model_flops_per_step(config, bench.length, bench.step_sequences)
    metrics = {}
    for name, rounds in times.items():
        every = sorted(t for taken in rounds for t in taken)
        tenth, median, ninetieth = np.percentile(every, [10, 50, 90]).tolist()
        metrics |= {
            f"{name}/step": {"value": median, "unit": "s"},
            f"{name}/step_least": {"value": every[0], "unit": "s"},
            f"{name}/step_p10": {"value": tenth, "unit": "s"},
            f"{name}/step_p90": {"value": ninetieth, "unit": "s"},
            f"{name}/tokens_per_s": {"value": bench.step_sequences * bench.length / median, "unit": "tokens/s"},
            f"{name}/model_flops_per_s": {"value": flops / median, "unit": "FLOP/s"},
            f"{name}/loss": {"value": statistics.mean(losses[name]), "unit": "nats"},
        }
        if memory[name] is not None:
            metrics[f"{name}/memory_peak"] = {"value": memory[name], "unit": "GiB"}
        if peak is not None:
            metrics[f"{name}/mfu"] = {"value": flops / median / peak, "unit": "of the sheet's peak"}
        if bench.peak_tflops_per_s is not None:
            share = flops / median / (bench.peak_tflops_per_s * TERA)
            metrics[f"{name}/share_of_given_peak"] = {"value": share, "unit": "of peak_tflops_per_s"}
        if name != "ours":
            paired = [statistics.median(a) / statistics.median(b) for a, b in zip(rounds, times["ours"], strict=True)]
            ours = sorted(t for taken in times["ours"] for t in taken)
            metrics |= {
                f"{name}/ratio": {"value": median / statistics.median(ours), "unit": "their time / ours"},
                f"{name}/ratio_paired": {"value": statistics.median(paired), "unit": "their time / ours"},
                f"{name}/ratio_least": {"value": every[0] / ours[0], "unit": "their time / ours"},
            }
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": torch.get_num_threads()}
    name = f"bench_{bench.model.get('name', config.family)}"
    record = new_record(name, "run", bench.to_dict(), bench.seed, metrics, device=name_of_device, layout=layout)
    return record | {"attention": attention}
