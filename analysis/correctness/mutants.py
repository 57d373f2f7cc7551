"""Plant small mistakes in the source, one at a time, and count those that the fast tests detect.

    python analysis/correctness/mutants.py                    # every planned mutant without an outcome yet
    python analysis/correctness/mutants.py --only src/lmscale/parallel/rng.py --limit 20
    python analysis/correctness/mutants.py --survivors        # again those that no test detected

`mutation_sites.py` finds the places. `mutants_plan.yaml` says which of them are tried and which test files may detect
them: a committed map, because line coverage of spawned ranks would need a tracer in each of them. A mutant is tried in
a copy of the tree, in a process forked from one that has imported the large libraries; the tests that have detected
mutants of the same file come first. It is killed when a test fails, or exceeds its time, that passes without it.
`mutants_equivalent.yaml` gives the reason for each survivor that computes the same. Outcomes are appended to
`records/mutants.jsonl`; `records/mutants.json` sums up. Two calls with different `--only` can run at once.
"""

import argparse
import compileall
import contextlib
import gc
import hashlib
import importlib
import json
import math
import multiprocessing.util
import os
import py_compile
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from analysis.correctness.mutation_sites import Mutant, mutants_of  # noqa: E402

HERE = Path(__file__).parent
PLAN, EQUIVALENT = HERE / "mutants_plan.yaml", HERE / "mutants_equivalent.yaml"
ROWS, SUMMARY = HERE / "records" / "mutants.jsonl", HERE / "records" / "mutants.json"
LIBRARIES = (
    "datasets",
    "hydra.core.hydra_config",
    "hypothesis",
    "lightning",
    "pyarrow.parquet",
    "pytest",
    "torch._dynamo",
    "torch._inductor.compile_fx",
)
LIBRARIES += ("safetensors.torch", "torch.distributed.device_mesh", "torch.distributed.launcher.api", "transformers")
DETECTED = (1, 2)  # exit codes of pytest; 2: the tests could not be imported
CRASHED = (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGSEGV, -signal.SIGXCPU)
LIMIT_FACTOR, LIMIT_S = 5.0, 15.0  # a test may take this many times its usual time, and this long in addition
UNKNOWN_S = 20.0  # the usual time of a test that has not been run without a mutant
SESSION_S, SESSION_CPU_S = 1200.0, 400  # all tests of a mutant; what each process may take of a processor


def planned() -> dict[str, tuple[Mutant, list[str]]]:
    """The mutants of the plan by key, in its order, each with the test files that may detect it.

    Of the functions under `every` all mutants are taken, of the rest of the file `draw`: those whose key has the lowest
    hash with the plan's seed, so that a change elsewhere in the file does not alter the draw.
    """
    plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))

    def place(mutant: Mutant) -> str:
        return hashlib.blake2b(f"{plan['seed']} {mutant.key}".encode()).hexdigest()

    found = {}
    for file, entry in plan["files"].items():
        mutants = mutants_of(file, (ROOT / file).read_text(encoding="utf-8"))
        every = [m for m in mutants if any(re.fullmatch(name, m.function) for name in entry.get("every", []))]
        rest = sorted((m for m in mutants if m not in every), key=place)[: entry.get("draw", 0)]
        found |= {m.key: (m, entry["tests"]) for m in mutants if m in every or m in rest}
    return found


def import_libraries() -> None:
    """Import what tests and package need, but not the package: forked processes import that from their own tree."""
    for name in LIBRARIES:
        importlib.import_module(name)
    assert not any(name.startswith("lmscale") for name in sys.modules)
    gc.freeze()  # garbage collection would touch, and so copy, the shared pages


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that only this process removes, not forked ones that end as Python does (`TemporaryDirectory`)."""
    folder = Path(tempfile.mkdtemp(prefix="mutants_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_tree(tree: Path) -> Path:
    """Copy the files of the checkout that git does not ignore, with byte code that is checked by its source's hash."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    compileall.compile_dir(tree / "src", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    (tree / "tmp").mkdir()
    return tree


class Order:
    """A plugin of pytest that orders the tests and limits their time.

    Args:
        killers: how many mutants of the same source file each test has detected.
        times: seconds that these tests take without a mutant.
    """

    def __init__(self, killers: Counter, times: dict[str, float]) -> None:
        self.killers, self.times = killers, times

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run first what detects most mutants per second, then the others in the plan's order."""
        items.sort(key=lambda item: -self.killers[item.nodeid] / (1.0 + self.times.get(item.nodeid, 0.0)))
        for item in items:
            usual_s = self.times.get(item.nodeid, UNKNOWN_S)
            item.add_marker(pytest.mark.timeout(LIMIT_S + LIMIT_FACTOR * usual_s))


def run_tests(tree: Path, tests: list[str], order: Order | None = None) -> tuple[str, str]:
    """Run tests of a tree until one fails: `passed`, `failed` or `timed out`, and the test that failed."""
    log, deadline = tree / "tmp" / "log", time.monotonic() + SESSION_S
    pid = _fork(_run_pytest, tree, tests, log, order or Order(Counter(), {}))
    try:
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also servers and ranks that the tests started
    if ended[0] == 0:
        os.waitpid(pid, 0)
        return "timed out", tests[0]
    code, text = os.waitstatus_to_exitcode(ended[1]), log.read_text(encoding="utf-8", errors="replace")
    if code == 0:
        return "passed", ""
    if code not in DETECTED and code not in CRASHED:
        raise RuntimeError(f"pytest ended with code {code} for {tests}:\n{text[-3000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.M)  # identifiers may have spaces
    outcome = "timed out" if code == -signal.SIGXCPU or "from pytest-timeout" in text else "failed"
    return outcome, failed[0] if failed else tests[0]


def _fork(function: Callable[..., int], *arguments: object) -> int:
    """Call a function that returns an exit code in a forked process; returns the process's id."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = function(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(ValueError):  # it may be closed
                sys.stdout.flush()
            os._exit(code)
    return pid


def _run_pytest(tree: Path, tests: list[str], log: Path, order: Order) -> int:
    os.setsid()
    os.chdir(tree)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SESSION_CPU_S, resource.RLIM_INFINITY))
    os.environ |= {"PYTHONPATH": f"{tree}/src", "TMPDIR": f"{tree}/tmp"}
    tempfile.tempdir = None
    sys.path[:0] = [f"{tree}/src", str(tree)]
    try:
        importlib.import_module("lmscale.training.pretrain")
    except Exception:
        traceback.print_exc()
        return DETECTED[1]
    # The tests' server of ranks (tests/warm.py) would be a new Python, which imports the libraries for seconds.
    new_python, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, _fork_python
    forkserver.ensure_running()
    multiprocessing.util.spawnv_passfds = new_python
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    return int(pytest.main([*options, *tests], plugins=[order]))


def _fork_python(path: bytes, arguments: list[str], open_files: list[int]) -> int:
    """Run the code of `python ... -c code` in a fork of this process, like `multiprocessing.util.spawnv_passfds`."""

    def run() -> int:
        for number in map(int, os.listdir("/dev/fd")):
            if number > 2 and number not in open_files:
                with contextlib.suppress(OSError):
                    os.close(number)
        with contextlib.suppress(SystemExit):
            exec(arguments[-1], {})
        return 0

    return _fork(run)


def try_mutant(tree: Path, mutant: Mutant, tests: list[str], times: dict[str, float]) -> dict:
    """Plant one mutant in a tree, run its tests until one detects it, and restore the file; returns the row.

    Args:
        times: of the tests that have passed without a mutant; the test that detects this one is added.

    Raises:
        RuntimeError: that test does not pass without a mutant.
    """
    path, started = tree / mutant.file, time.monotonic()
    source = path.read_bytes()
    path.write_bytes(mutant.plant(source))
    killers = Counter(row["by"] for key, row in read_rows().items() if key.startswith(f"{mutant.file} "))
    try:
        found, by = run_tests(tree, tests, Order(killers, times))
    finally:
        path.write_bytes(source)
    row = {"key": mutant.key, "line": mutant.line, "operator": mutant.operator}
    row |= {"outcome": {"passed": "survived", "failed": "killed"}.get(found, found), "by": by}
    row["seconds"] = round(time.monotonic() - started, 1)
    if by and by not in times:
        started = time.monotonic()
        if (outcome := run_tests(tree, [by])) != ("passed", ""):
            log = (tree / "tmp" / "log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{by} must pass without a mutant, but {outcome[0]}:\n{log[-3000:]}")
        times[by] = round(time.monotonic() - started, 1)
        if found == "timed out" and times[by] > UNKNOWN_S:
            raise RuntimeError(f"{by} takes {times[by]} s without a mutant, so its limit proves nothing")
    return row


def try_all(todo: list[tuple[Mutant, list[str]]]) -> None:
    """Try mutants one by one and append their rows."""
    times: dict[str, float] = {}
    with temporary_folder() as folder:
        tree = copy_tree(folder / "0")
        for number, (mutant, tests) in enumerate(todo, start=1):
            try:
                row = try_mutant(tree, mutant, tests, times)
            except RuntimeError as error:  # no outcome; the next call tries it again
                print(f"{mutant.key}: {error}", file=sys.stderr, flush=True)
                tree = copy_tree(folder / str(number))
                continue
            with open(ROWS, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['outcome']:9s} {row['seconds']:5.1f} s  {row['key']}", flush=True)


def try_by_hand(changes: dict[str, tuple[str, str, str, str]]) -> dict[str, str]:
    """Outcome of the test of each change (file, old text, new text, test) with the change: `failed` if it is detected.

    Raises:
        RuntimeError: one of the tests does not pass without its change.
    """
    import_libraries()
    found = {}
    with temporary_folder() as folder:
        tree = copy_tree(folder / "0")
        outcome, failed = run_tests(tree, [test for *_, test in changes.values()])
        if outcome != "passed":
            raise RuntimeError(f"{failed} must pass without a change, but {outcome}")
        for name, (file, old, new, test) in changes.items():
            source = (tree / file).read_text(encoding="utf-8")
            assert source.count(old) == 1, f"{file} must have `{old}` once"
            (tree / file).write_text(source.replace(old, new), encoding="utf-8")
            found[name] = run_tests(tree, [test])[0]
            (tree / file).write_text(source, encoding="utf-8")
    return found


def read_rows() -> dict[str, dict]:
    """The last row of each mutant by key."""
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share.

    Source: Wilson 1927.
    """
    if total == 0:
        return 0.0, 1.0
    share, centre = hits / total, hits / total + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (centre - spread) / (1 + z * z / total), (centre + spread) / (1 + z * z / total)


def count(tried: dict[str, dict], reasons: dict[str, str]) -> dict:
    """How many of the tried mutants were killed, how many others are equivalent, and the kill rate of the rest."""
    survived = [key for key, row in tried.items() if row["outcome"] == "survived"]
    equivalent, killed = sum(key in reasons for key in survived), len(tried) - len(survived)
    rest = len(tried) - equivalent
    return {
        "total": len(tried),
        "killed": killed,
        "equivalent": equivalent,
        "survived": rest - killed,
        "kill_rate": round(killed / max(rest, 1), 4),
        "interval_95": [round(bound, 4) for bound in wilson(killed, rest)],
    }


def summarize(rows: dict[str, dict], plan: dict[str, tuple[Mutant, list[str]]], reasons: dict[str, str]) -> dict:
    """Counts over the planned mutants that have been tried, and the survivors by place and change."""
    tried = {key: rows[key] for key in plan if key in rows}
    survived = [key for key, row in tried.items() if row["outcome"] == "survived"]
    by_file = {}
    for file in dict.fromkeys(mutant.file for mutant, _ in plan.values()):
        of_file = {key: row for key, row in tried.items() if key.startswith(f"{file} ")}
        by_file[file] = {"planned": sum(m.file == file for m, _ in plan.values()), **count(of_file, reasons)}
    return {
        "planned": len(plan),
        "partial": len(tried) < len(plan),
        **count(tried, reasons),
        "killed_by_time": sum(row["outcome"] == "timed out" for row in tried.values()),
        "equivalent": {key: reasons[key] for key in survived if key in reasons},
        "survived": {key: tried[key]["line"] for key in survived if key not in reasons},
        "by_file": by_file,
    }


def main() -> None:
    """Try mutants and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="FILE", help="try only the mutants of these files")
    parser.add_argument("--limit", type=int, help="try at most this many")
    parser.add_argument("--survivors", action="store_true", help="try again those that survived")
    options = parser.parse_args()
    plan, rows = planned(), read_rows()
    reasons = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or {}
    again = {key for key, row in rows.items() if row["outcome"] == "survived" and key not in reasons}
    wanted = again if options.survivors else plan.keys() - rows.keys()
    files = options.only or [mutant.file for mutant, _ in plan.values()]
    todo = [entry for key, entry in plan.items() if key in wanted and entry[0].file in files]
    try:
        if todo := todo[: options.limit]:
            import_libraries()
            try_all(todo)
    finally:
        summary = summarize(read_rows(), plan, reasons)
        SUMMARY.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        print({key: summary[key] for key in ("planned", "total", "killed", "kill_rate", "interval_95")})
        print(*(f"survived: {key} (line {line})" for key, line in summary["survived"].items()), sep="\n")


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the copies of the tree
    main()
