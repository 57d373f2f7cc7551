"""Records of the norm-order study with given losses."""

import itertools
import json
from pathlib import Path

from omegaconf import OmegaConf

from analysis.norm_order.run_folder import NATS
from lmscale.results import new_record, write_record

SWEEP = Path(__file__).parents[2] / "conf" / "train" / "sweep" / "norm_order.yaml"
RATES = ("1e-3", "3e-3")


def write_cell(folder: Path, layers: int, order: str, scaled: bool, lr: str, seed: int, loss: float, **metrics) -> None:
    """A record like those of the script, with a given loss."""
    values = {"train_loss": loss, "lowest_loss": loss, "validation_loss": loss}
    values |= {"context_free_loss": 6.0, "scored_entropy": 6.5}
    values |= {"non_finite": 0, "cpu_time": 2.0} | metrics
    entries = {name: {"value": value, "unit": NATS} for name, value in values.items()}
    cell = {"layers": layers, "order": order, "scaled": scaled, "lr": lr, "seed": seed}
    norms = {"embedding": 1.0, "output": 1.0} | {f"layer_{i}": 0.1 * (i + 1) for i in range(layers)}
    config = {"cell": cell, "window": 25, "curve": [5.0, loss], "gradient_norms": {"1": norms, "50": norms}}
    config["sweep"] = OmegaConf.to_container(OmegaConf.load(SWEEP), resolve=False)
    record = new_record("norm_order_cell", "scaled_down", config, seed, entries)
    write_record(record, folder / f"{layers}_{order}_{scaled}_{lr}_{seed}.json")


def records_of(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def make_study(folder: Path) -> Path:
    """Two depths: pre-norm is better by 0.5, both share a seed effect, and 3e-3 is the better rate."""
    for order, scaled, seed in itertools.product(("pre", "post"), (True, False), (1, 2, 3)):
        loss = 4.0 + 0.1 * seed + (0.5 + 0.01 * (seed - 2)) * (order == "post") + 0.2 * (not scaled)
        for lr in RATES:
            write_cell(folder, 4, order, scaled, lr, seed, loss + 0.3 * (lr == "1e-3"))
        write_cell(folder, 8, order, scaled, "3e-3", seed, loss + 0.1)
    return folder
