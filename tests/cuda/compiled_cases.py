"""The layers and losses that are compiled for a simulated GPU, and the expected counts of their code.

`python tests/cuda/compiled_cases.py` compiles all of them (five to eight minutes) and writes `expected_code.yaml` anew,
after a change that is meant to change the generated code.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import fake_gpu
import yaml
from fake_ranks import grid_of
from pairwise import pairwise

TABLE = Path(__file__).with_name("expected_code.yaml")
FACTORS = {
    "layout": ("tp1", "tp2", "tp8", "tp2 sequence", "tp8 sequence"),
    "rank": ("first", "last"),
    "family": ("gpt", "bert"),
    "norm_order": ("pre", "post"),
    "dtype": ("bf16", "fp16", "fp32", "fp8"),
    "recompute": ("none", "selective"),
    "dropout": (0.0, 0.1),
    "attention": ("sdpa", "exact"),
}
LAYERS_IN_CI = [
    dict(zip(FACTORS, values, strict=True))
    for values in (
        ("tp1", "first", "gpt", "pre", "bf16", "none", 0.1, "sdpa"),
        ("tp1", "first", "gpt", "pre", "bf16", "selective", 0.1, "sdpa"),
        ("tp2 sequence", "last", "gpt", "pre", "bf16", "none", 0.1, "sdpa"),
        ("tp8", "last", "gpt", "pre", "bf16", "none", 0.1, "exact"),
        ("tp8 sequence", "last", "bert", "post", "fp16", "selective", 0.1, "sdpa"),
        ("tp1", "first", "gpt", "pre", "fp8", "none", 0.0, "sdpa"),
        ("tp8 halves", "last", "gpt", "pre", "bf16", "none", 0.1, "sdpa"),
        ("tp2 sequence halves", "last", "bert", "post", "fp16", "selective", 0.1, "sdpa"),
    )
]
MATRIX = pairwise(FACTORS)
LOSSES = {
    "loss, tp1 gpt bf16": {"dtype": "bf16"},
    "loss, tp8 last bert bf16": {"tp_size": 8, "tp_rank": 7, "dtype": "bf16", "bias": True},
    "loss, tp1 gpt fp32": {"dtype": "fp32"},
}


def name_of(choice: dict[str, Any]) -> str:
    """The name of a layer in the table."""
    return " ".join(map(str, choice.values()))


def layer_case(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of `FACTORS` as a case of `compiled_layer.py`."""
    grid = grid_of(choice | {"data": "dp1"})
    model = {name: choice[name] for name in ("norm_order", "recompute", "attention")}
    return {
        "tp_size": grid["tp_size"],
        "tp_rank": grid["rank"],
        "sequence_parallel": grid["sequence_parallel"],
        "batch_halves": grid["batch_halves"],
        "family": choice["family"],
        "dtype": choice["dtype"],
        "float8": choice["dtype"] == "fp8",
        "model": model | dict.fromkeys(("hidden_dropout", "attention_dropout"), choice["dropout"]),
    }


def compile_layers(guard: Path, choices: list[dict[str, Any]]) -> dict[str, dict]:
    """What `compiled_layer.py` prints for each choice, by name."""
    found = fake_gpu.run("compiled_layer.py", guard, [layer_case(choice) for choice in choices])
    return {name_of(choice): one for choice, one in zip(choices, found, strict=True)}


def compile_losses(guard: Path) -> dict[str, dict]:
    """What `compiled_loss.py` prints for each of `LOSSES`, by name."""
    return dict(zip(LOSSES, fake_gpu.run("compiled_loss.py", guard, list(LOSSES.values())), strict=True))


def counts_of(found: dict) -> dict[str, int]:
    """Number of graphs, graph breaks, Triton kernels, and launches of any kernel or collective."""
    kernels, launches = len(found["cubins"]) + len(found["refused"]), sum(map(len, found["calls"]))
    return {"graphs": found["graphs"], "breaks": found["breaks"], "kernels": kernels, "launches": launches}


def problems_of(name: str, found: dict) -> list[str]:
    """What is wrong with the generated code, in one line each."""
    refused = [f"Triton refuses {kernel}: {reason}" for kernel, reason in found["refused"].items()]
    expected = yaml.safe_load(TABLE.read_text())[name]
    differing = {what: number for what, number in counts_of(found).items() if number != expected[what]}
    return refused + [f"{number} {what}, expected {expected[what]}" for what, number in differing.items()]


def main() -> None:
    """Write the table."""
    choices = {name_of(choice): choice for choice in LAYERS_IN_CI + MATRIX}
    with tempfile.TemporaryDirectory() as folder:
        guard = fake_gpu.build_guard(Path(folder))
        found = compile_layers(guard, list(choices.values())) | compile_losses(guard)
    refused = {name: one["refused"] for name, one in found.items() if one["refused"]}
    if refused:
        sys.exit(f"Triton refuses {refused}")
    head = "# Written by compiled_cases.py. Layers: " + ", ".join(FACTORS) + ".\n"
    lines = [
        f"{name}: {{{', '.join(f'{k}: {v}' for k, v in counts_of(one).items())}}}\n" for name, one in found.items()
    ]
    TABLE.write_text(head + "".join(lines))


if __name__ == "__main__":
    main()
