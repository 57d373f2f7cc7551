"""Plant small mistakes in the source, one at a time, and count those that the fast tests detect.

    python analysis/correctness/mutants.py                    # every planned mutant without an outcome yet
    python analysis/correctness/mutants.py --only src/lmscale/parallel/rng.py --limit 20 --jobs 2
    python analysis/correctness/mutants.py --survivors        # again those that no test detected

`mutation_sites.py` finds the places. `mutants_plan.yaml` says which of them are tried and which test files may detect
them: a committed map, because line coverage of spawned ranks would need a tracer in each of them. A mutant is tried in
a copy of the tree, against its test files one by one, the fastest first, in processes forked from one that has imported
the large libraries. It is killed when a test fails or exceeds its time. `mutants_equivalent.yaml` gives the reason for
each survivor that computes the same. Outcomes are appended to `records/mutants.jsonl`; `records/mutants.json` sums up.
"""

import argparse
import compileall
import contextlib
import gc
import hashlib
import importlib
import json
import math
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from analysis.correctness.mutation_sites import Mutant, mutants_of  # noqa: E402

HERE = Path(__file__).parent
PLAN, EQUIVALENT = HERE / "mutants_plan.yaml", HERE / "mutants_equivalent.yaml"
ROWS, SUMMARY = HERE / "records" / "mutants.jsonl", HERE / "records" / "mutants.json"
TIMES = ROOT / "outputs" / "mutants_times.json"  # seconds of each test file on this machine
LIBRARIES = (
    "datasets",
    "hydra.core.hydra_config",
    "hypothesis",
    "lightning",
    "pyarrow.parquet",
    "pytest",
    "torch._dynamo",
)
LIBRARIES += ("safetensors.torch", "torch.distributed.device_mesh", "torch.distributed.launcher.api", "transformers")
DETECTED = (1, 2)  # exit codes of pytest; 2: the tests could not be imported
LIMIT_FACTOR, LIMIT_S = 5.0, 15.0  # a test file may take this many times its usual time, and this long in addition


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


def run_tests(tree: Path, tests: list[str], limit_s: float) -> tuple[str, str]:
    """Run tests of a tree until one fails: `passed`, `failed` or `timed out`, and the test that failed."""
    log, deadline = tree / "tmp" / "log", time.monotonic() + limit_s
    pid = _fork(_run_pytest, tree, tests, log)
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
    if code not in DETECTED and code >= 0:
        raise RuntimeError(f"pytest ended with code {code} for {tests}:\n{text[-3000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    return "failed", failed[0] if failed else tests[0]


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
            sys.stdout.flush()
            os._exit(code)
    return pid


def _run_pytest(tree: Path, tests: list[str], log: Path) -> int:
    os.setsid()
    os.chdir(tree)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    os.environ |= {"PYTHONPATH": f"{tree}/src", "TMPDIR": f"{tree}/tmp"}
    tempfile.tempdir = None
    sys.path[:0] = [f"{tree}/src", str(tree)]
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    return int(pytest.main([*options, *tests]))


def measure(tree: Path, tests: list[str], times: dict[str, float]) -> None:
    """Run each test file without a mutant, unless its time is known; all must pass."""
    for test in tests:
        if test not in times:
            started = time.monotonic()
            outcome, failed = run_tests(tree, [test], 600.0)
            if outcome != "passed":
                raise RuntimeError(f"{test} must pass without a mutant, but {outcome}: {failed}")
            times[test] = round(time.monotonic() - started, 2)
            TIMES.parent.mkdir(exist_ok=True)
            TIMES.write_text(json.dumps(times, indent=1), encoding="utf-8")
            print(f"{times[test]:6.1f} s  {test}", flush=True)


def try_mutant(tree: Path, mutant: Mutant, tests: list[str], times: dict[str, float]) -> int:
    """Plant one mutant in a tree, run the tests until one detects it, restore the file, and write the file `row`."""
    path, started = tree / mutant.file, time.monotonic()
    source = path.read_bytes()
    path.write_bytes(mutant.plant(source))
    outcome, by = "survived", ""
    try:
        for test in sorted(tests, key=times.__getitem__):
            found, failed = run_tests(tree, [test], LIMIT_S + LIMIT_FACTOR * times[test])
            if found != "passed":
                outcome, by = "killed" if found == "failed" else "timed out", failed
                break
    finally:
        path.write_bytes(source)
    row = {"key": mutant.key, "line": mutant.line, "operator": mutant.operator, "outcome": outcome}
    row |= {"by": by, "seconds": round(time.monotonic() - started, 1)}
    (tree / "row").write_text(json.dumps(row), encoding="utf-8")
    return 0


def try_all(todo: list[tuple[Mutant, list[str]]], jobs: int, times: dict[str, float]) -> None:
    """Try mutants in `jobs` processes, each with its own tree, and append their rows."""
    with tempfile.TemporaryDirectory(prefix="mutants_", ignore_cleanup_errors=True) as folder:
        free = [copy_tree(Path(folder, str(job))) for job in range(jobs)]
        running: dict[int, Path] = {}
        queue = list(todo)
        while queue or running:
            while queue and free:
                (mutant, tests), tree = queue.pop(0), free.pop()
                measure(tree, tests, times)
                running[_fork(try_mutant, tree, mutant, tests, times)] = tree
            pid, status = os.wait()
            free.append(running.pop(pid))
            if status != 0:
                raise RuntimeError("a mutant could not be tried; see the traceback above")
            text = (free[-1] / "row").read_text(encoding="utf-8")
            with open(ROWS, "a", encoding="utf-8") as file:
                file.write(text + "\n")
            row = json.loads(text)
            print(f"{row['outcome']:9s} {row['seconds']:5.1f} s  {row['key']}", flush=True)


def try_by_hand(changes: dict[str, tuple[str, str, str, str]]) -> dict[str, str]:
    """Outcome of the test of each change (file, old text, new text, test) with the change: `failed` if it is detected.

    Raises:
        RuntimeError: one of the tests does not pass without its change.
    """
    import_libraries()
    found = {}
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        tree = copy_tree(Path(folder))
        outcome, failed = run_tests(tree, [test for *_, test in changes.values()], 120.0)
        if outcome != "passed":
            raise RuntimeError(f"{failed} must pass without a change, but {outcome}")
        for name, (file, old, new, test) in changes.items():
            source = (tree / file).read_text(encoding="utf-8")
            assert source.count(old) == 1, f"{file} must have `{old}` once"
            (tree / file).write_text(source.replace(old, new), encoding="utf-8")
            found[name] = run_tests(tree, [test], 60.0)[0]
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


def summarize(rows: dict[str, dict], plan: dict[str, tuple[Mutant, list[str]]], reasons: dict[str, str]) -> dict:
    """Counts over the planned mutants that have been tried, and the survivors by place and change."""
    tried = {key: rows[key] for key in plan if key in rows}
    survived = [key for key, row in tried.items() if row["outcome"] == "survived"]
    equivalent = {key: reasons[key] for key in survived if key in reasons}
    killed = len(tried) - len(survived)
    low, high = wilson(killed, len(tried) - len(equivalent))
    return {
        "planned": len(plan),
        "total": len(tried),
        "partial": len(tried) < len(plan),
        "killed": killed,
        "killed_by_time": sum(row["outcome"] == "timed out" for row in tried.values()),
        "equivalent": equivalent,
        "survived": {key: tried[key]["line"] for key in survived if key not in reasons},
        "kill_rate": round(killed / max(len(tried) - len(equivalent), 1), 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "by_file": {
            file: {
                "planned": sum(m.file == file for m, _ in plan.values()),
                "total": sum(key.startswith(f"{file} ") for key in tried),
                "survived": sum(key.startswith(f"{file} ") and key not in reasons for key in survived),
            }
            for file in dict.fromkeys(m.file for m, _ in plan.values())
        },
    }


def main() -> None:
    """Try mutants and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once, each in its own copy of the tree")
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
    if todo := todo[: options.limit]:
        import_libraries()
        times = json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}
        try_all(todo, options.jobs, times)
    summary = summarize(read_rows(), plan, reasons)
    SUMMARY.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print({key: summary[key] for key in ("planned", "total", "killed", "kill_rate", "interval_95")})
    print(*(f"survived: {key} (line {line})" for key, line in summary["survived"].items()), sep="\n")


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the copies of the tree
    main()
