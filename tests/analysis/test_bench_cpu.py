"""The commands of `bench_cpu.sh` match their entry points, and the table of goals is correct."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from composed import composed

from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.tables import cpu_speed

ROOT = Path(__file__).parents[2]


def commands(**changes: str) -> list[list[str]]:
    """The commands of all parts."""
    script = str(ROOT / "analysis" / "benchmarks" / "bench_cpu.sh")
    environment = os.environ | {"DRY_RUN": "1"} | changes
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)
    return [shlex.split(line)[1:] for line in done.stdout.splitlines()]


def test_every_comparison_builds_its_typed_configuration(tmp_path) -> None:
    model_file = tmp_path / "model.py"
    model_file.write_text("class GPT: ...\nclass GPTConfig: ...\n")
    benches, others = [], []
    for script, *words in commands(NANOGPT=str(model_file)):
        if script != "analysis/benchmarks/bench.py":
            others.append(script)
            continue
        benches.append(BenchConfig.from_dict(composed("bench", *words)))
    assert [bench.peers for bench in benches] == [
        ["hf_compiled"],
        ["hf_eager"],
        ["file_eager", "file_compiled"],
        ["hf_compiled"],
    ]
    assert {(bench.precision.dtype, bench.length, bench.micro_batch_size) for bench in benches} == {("bf16", 256, 8)}
    assert len(others) == 1 and all((ROOT / script).is_file() for script in others)


@pytest.mark.parametrize(("value", "reached"), [(1.5, "yes"), (1.49, "no")])
def test_a_goal_is_reached_by_the_median_of_all_runs(value: float, reached: str) -> None:
    runs = {f"cpu/{run}/bench_bert_cpu.json": {"metrics": bert_ratio(ratio)} for run, ratio in enumerate((2, value, 1))}
    table = cpu_speed(runs | {"cpu/0/bench_gpt_cpu.json": {"metrics": {}}})
    (row,) = table[table["median"].notna()].to_dict("records")
    assert [row[name] for name in ("median", "least", "most", "runs", "reached")] == [value, 1, 2, 3, reached]
    assert set(table[table["median"].isna()]["reached"]) == {"not run"}


def bert_ratio(value: float) -> dict:
    return {"hf_compiled/ratio_paired": {"value": value, "unit": "their time / ours"}}


def test_lower_is_better_for_times_and_bytes() -> None:
    for value, reached in ((0.0009, "yes"), (0.0011, "no")):
        record = {"lightning_cost_cpu.json": {"metrics": {"overhead": {"value": value, "unit": "s"}}}}
        table = cpu_speed(record)
        assert list(table[table["runs"] > 0]["reached"]) == [reached]


def test_unknown_and_skipped_parts_are_reported_before_measuring() -> None:
    script = str(ROOT / "analysis" / "benchmarks" / "bench_cpu.sh")
    done = subprocess.run(["bash", script, "2", "9"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: a part must be one of 1 2 3 4, but is 9\n"
    without = os.environ | {"DRY_RUN": "1", "NANOGPT": ""}
    done = subprocess.run(["bash", script, "2"], env=without, capture_output=True, text=True, check=True)
    assert done.stdout.count("bench.py") == 1 and "bench_nanogpt_cpu" not in done.stdout  # an existing record is kept
    assert done.stdout.endswith("against nanoGPT: not measured, NANOGPT=path/to/model.py is not set\n")
