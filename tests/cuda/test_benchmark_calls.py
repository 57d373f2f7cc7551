"""What `analysis/benchmarks/h200.sh` calls on a GPU, on fake CUDA tensors: real shapes, and steps without host syncs.

Not covered: times, which attention kernel is chosen, the profiler, CUDA graphs, and FlashAttention-3, which must be
installed.
"""

import os
import shlex
import subprocess
from pathlib import Path

import fake_gpu
import pytest
from fake_step import problems_of

SCRIPT = Path(__file__).parents[2] / "analysis" / "benchmarks" / "h200.sh"


def commands() -> list[list[str]]:
    """The words of every command of the lists for one GPU."""
    words = ["bash", str(SCRIPT), "a", "b", "d"]
    done = subprocess.run(words, env=os.environ | {"DRY_RUN": "1"}, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_products_and_steps_of_the_script_run_on_fake_cuda_tensors(guard) -> None:
    found = commands()
    products = [words for words in found if any(word.endswith("products.py") for word in words)]
    steps = [step for words in products for step in words[words.index("--step") + 1 : words.index("--seconds")]]
    benches = [words[6:] for words in found if words[5:6] == ["analysis/benchmarks/bench.py"]]
    rows = [words for words in benches if "model.attention=flash3" not in words]
    assert len(steps) == 3 and len(rows) == len(benches) - 1 == 15
    answer = fake_gpu.run("benchmark_calls.py", guard, {"steps": steps, "rows": rows})
    assert answer["products"] == [15, 12, 39]
    assert [problems_of(row) for row in answer["rows"]] == [[]] * len(rows)
