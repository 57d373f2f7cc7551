"""Fuzz everything that reads files from elsewhere: checkpoints, token files, JSON metadata, benchmark files.

    python analysis/correctness/fuzz_readers.py --minutes 20 --folder outputs/fuzz

An input is a tree of JSON values that a target turns into files: the fields of `metadata.json` with its checksum
corrected, a safetensors header with its length corrected, the entries of an `.idx`, the cells of a table. Mutations
change the tree, sometimes also the written bytes. Inputs that reach new branches of `lmscale` are kept and mutated
further; they are stored in the folder, and a later start continues from them. A reader may accept an input or raise our
one-line `ValueError`. Every other exception, more than 256 MB of new address space and more than 10 s of processor time
are findings.
Prints the seed, one line per finding and a table, and writes a record; exit code 1 if there are findings.
"""

import argparse
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns about token ids of mutated configurations

import lmscale
from analysis.correctness.fuzz_targets import DEEP, DIGITS, TARGETS, Target
from lmscale.checkpoint import CheckpointError, CheckpointVersionError
from lmscale.results import new_record, record_argument, write_record

PACKAGE = str(Path(lmscale.__file__).parent)
MAX_BYTES, MAX_SECONDS = 256 << 20, 10.0
MAX_TREE = 200_000  # characters of JSON
VALUES = [None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63), 2**64, 10**30, 0.0, 1.5]
VALUES += [-0.5, 1e308, float("nan"), float("inf"), "", " ", "\n", "a\nb", "\t", "\r", "\u2028", "\ud800", "\x00"]
VALUES += ["..", "/", "../x.safetensors", "F32", "BF16", "model/x", "A", "0", "1", [], {}, [[]], [0], [None], {"": 0}]
VALUES += [f"{DEEP}10", f"{DEEP}900", f"{DEEP}990", f"{DEEP}100000", DIGITS]


class TooSlowError(BaseException):
    """A reader took too long; no handler of the readers catches it."""


def main() -> int:
    """Fuzz for some minutes and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--quiet-minutes", type=float, default=20.0, help="stop after so long without a new branch")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument("--folder", type=Path, default=Path("outputs/fuzz"), help="of kept inputs, for a later start")
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--record", type=record_argument, default=None, help="default: fuzz.json in the folder")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else time.time_ns() % 10**6
    print(f"seed {seed}", flush=True)
    fuzzers = [Fuzzer(TARGETS[name], random.Random(f"{seed} {name}"), options.folder) for name in options.targets]
    start = time.monotonic()
    while time.monotonic() < start + 60 * options.minutes:
        for fuzzer in fuzzers:
            fuzzer.try_inputs(50)
        if time.monotonic() - max(fuzzer.last_new for fuzzer in fuzzers) > 60 * options.quiet_minutes:
            break
    seconds = time.monotonic() - start
    quiet = time.monotonic() - max(fuzzer.last_new for fuzzer in fuzzers)
    print(f"\n{'target':<14}{'inputs':>9}{'accepted':>10}{'refused':>9}{'branches':>10}{'findings':>10}")
    metrics = {"time": {"value": seconds, "unit": "s"}, "time_without_new_branch": {"value": quiet, "unit": "s"}}
    for fuzzer in fuzzers:
        name, counts = fuzzer.target.name, fuzzer.counts()
        print(f"{name:<14}{counts['inputs']:>9}{counts['accepted']:>10}{counts['refused']:>9}", end="")
        print(f"{counts['branches']:>10}{counts['findings']:>10}")
        metrics |= {f"{name}/{what}": {"value": count, "unit": what} for what, count in counts.items()}
    config = {"targets": options.targets, "minutes": options.minutes}
    record = new_record("fuzz_readers", "run", config, seed, metrics, device="cpu")
    write_record(record, options.record or options.folder / "fuzz.json")
    return 1 if any(fuzzer.findings for fuzzer in fuzzers) else 0


class Fuzzer:
    """The search of one target.

    Args:
        folder: of kept inputs (`<target>.jsonl`) and findings; None keeps none.
    """

    def __init__(self, target: Target, chance: random.Random, folder: Path | None = None) -> None:
        self.target, self.chance, self.folder = target, chance, folder
        self._folder = tempfile.TemporaryDirectory(prefix=f"fuzz_{target.name}_")  # removed with this object
        self.work = Path(self._folder.name)
        self.branches: set[tuple] = set()
        self.findings: dict[str, Any] = {}
        self.inputs = self.accepted = 0
        self.last_new = time.monotonic()
        self.kept: list[Any] = []
        self.target.prepare(self.work)
        for tree in [*target.seeds(), *self._stored()]:
            self._try(tree, is_new=False)
        if not self.accepted:
            raise RuntimeError(f"no seed of {target.name} is accepted")

    def try_inputs(self, count: int) -> None:
        """Try mutations of kept inputs."""
        for _ in range(count):
            try:
                tree = copy.deepcopy(self.chance.choice(self.kept))
                for _ in range(self.chance.choice((1, 1, 1, 1, 2, 4))):
                    tree = mutate(tree, self.chance, self.kept)
            except RecursionError:
                continue  # mutations have nested it too deeply for our own recursion
            self._try(tree)

    def counts(self) -> dict[str, int]:
        """Inputs tried, accepted and refused, branches reached, and findings."""
        refused = self.inputs - self.accepted
        found = {"branches": len(self.branches), "findings": len(self.findings)}
        return {"inputs": self.inputs, "accepted": self.accepted, "refused": refused} | found

    def _stored(self) -> list[Any]:
        path = self.folder / f"{self.target.name}.jsonl" if self.folder else None
        return [json.loads(line) for line in path.read_text().splitlines()] if path and path.is_file() else []

    def _store(self, name: str, value: Any) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")

    def _try(self, tree: Any, is_new: bool = True) -> None:
        folder = self.work / "input"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.work / "base", folder) if (self.work / "base").is_dir() else folder.mkdir()
        try:
            if len(json.dumps(tree)) > MAX_TREE:
                return
            self.target.write(tree, folder)
        except Exception:
            return  # the mutation cannot be written as files
        self.inputs += 1
        reached, refusal, finding = run_traced(lambda: self.target.read(folder))
        self.accepted += refusal is finding is None
        if reached - self.branches:
            self.branches |= reached
            self.kept.append(tree)
            self.last_new = time.monotonic()
            if is_new:
                self._store(f"{self.target.name}.jsonl", tree)
        if finding is not None and finding not in self.findings:
            self.findings[finding] = tree
            self._store("findings.jsonl", [self.target.name, finding, tree])
            print(f"{self.target.name}: {finding}", flush=True)


def run_traced(read: Callable[[], None]) -> tuple[set[tuple], str | None, str | None]:
    """Call a reader.

    Returns:
        the branches it took in the package (file, function, line, next line); the message of its refusal, or None if
        it accepts its input; and what is wrong with its reaction, or None.
    """
    reached: set[tuple] = set()

    def enter(frame: FrameType, event: str, _: Any) -> Callable | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        name, function, last = frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lineno

        def follow(frame: FrameType, event: str, _: Any) -> Callable:
            nonlocal last
            reached.add((name, function, last, frame.f_lineno))
            last = frame.f_lineno
            return follow

        return follow

    def too_slow(*_: Any) -> None:
        raise TooSlowError

    old = signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # of the processor: others on the machine must not make a finding
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, limits[1]))
    refusal = finding = None
    sys.settrace(enter)
    try:
        read()
    except TooSlowError:
        finding = f"more than {MAX_SECONDS:.0f} s"
    except Exception as error:
        sys.settrace(None)
        refusal, finding = str(error), judge(error)
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return reached, refusal, finding


def judge(error: Exception) -> str | None:
    """None for our error, a ValueError of one line that the package itself raises; otherwise a description."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "outside"
    if type(error) not in (ValueError, CheckpointError, CheckpointVersionError):
        return f"{type(error).__name__} in {place}"
    if len(str(error).splitlines()) != 1:
        return f"message of {len(str(error).splitlines())} lines in {place}"
    return None if frames[-1].line.startswith("raise ") else f"unnamed ValueError in {place}"


def mutate(tree: Any, chance: random.Random, others: list[Any]) -> Any:
    """Change one random node of a tree in place; returns the tree."""
    places = list(walk(tree))
    if not places:
        return tree
    parent, key = chance.choice(places)
    action = chance.randrange(8)
    if action == 0 and isinstance(parent, dict):
        del parent[key]
    elif action == 0 or action == 1:
        twin = copy.deepcopy(parent[key])
        parent.insert(key, twin) if isinstance(parent, list) else parent.update({f"{key}2": twin})
    elif action == 2:  # a node of the same or another input
        donors = list(walk(chance.choice(others))) or places
        donor, at = chance.choice(donors)
        parent[key] = copy.deepcopy(donor[at])
    elif action == 3 and isinstance(parent, dict) and chance.random() < 0.3:  # another name
        parent[str(chance.choice(VALUES))] = parent.pop(key)
    elif action == 3 and isinstance(parent, list):
        del parent[key]
    elif action <= 5:
        parent[key] = perturb(parent[key], chance)
    else:
        parent[key] = copy.deepcopy(chance.choice(VALUES))
    return tree


def walk(tree: Any):
    """All (container, key) of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from walk(value)


def perturb(value: Any, chance: random.Random) -> Any:
    """A value of the same kind nearby."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return chance.choice((value + 1, value - 1, -value, 2 * value, value + 2**32, value + 2**63, float(value)))
    if isinstance(value, float):
        return chance.choice((-value, int(value) if abs(value) < 1e9 else 0, str(value), 1e400))
    if isinstance(value, str):
        place = chance.randrange(len(value) + 1)
        piece = chance.choice(("", "\n", "\x00", "\ud83d", "\u2028", "9", '"', "\t", "/", "=", " ", value))
        return chance.choice((value[:place] + piece + value[place:], value[:place], value[place:]))
    return chance.choice(([], {}, [value], {"0": value}))


if __name__ == "__main__":
    sys.exit(main())
