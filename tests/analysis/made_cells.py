"""Records of the first norm-order study with given losses."""

import itertools

from analysis.norm_order.run_folder import NATS

RATES = ("1e-3", "3e-3")


def make_cell(layers: int, order: str, scaled: bool, lr: str, seed: int, loss: float, **metrics: float) -> dict:
    """The parts of a record that are read, with a given loss."""
    values = {"train_loss": loss, "lowest_loss": loss, "validation_loss": loss}
    values |= {"context_free_loss": 6.0, "scored_entropy": 6.5}
    values |= {"non_finite": 0, "cpu_time": 2.0} | metrics
    cell = {"layers": layers, "order": order, "scaled": scaled, "lr": lr, "seed": seed}
    norms = {"embedding": 1.0, "output": 1.0} | {f"layer_{i}": 0.1 * (i + 1) for i in range(layers)}
    config = {"cell": cell, "window": 25, "curve": [5.0, loss], "gradient_norms": {"1": norms, "50": norms}}
    return {"config": config, "metrics": {name: {"value": value, "unit": NATS} for name, value in values.items()}}


def make_study(**changed: dict) -> list[dict]:
    """Two depths: pre-norm is better by 0.5, both share a seed effect, and 3e-3 is the better rate.

    Args:
        changed: loss and metrics of a cell by its place, as in `_8_post_1` (at scaled initialization and 3e-3).
    """
    records = []
    for order, scaled, seed in itertools.product(("pre", "post"), (True, False), (1, 2, 3)):
        loss = 4.0 + 0.1 * seed + (0.5 + 0.01 * (seed - 2)) * (order == "post") + 0.2 * (not scaled)
        for layers, lr, more in ((4, "1e-3", 0.3), (4, "3e-3", 0.0), (8, "3e-3", 0.1)):
            own = changed.get(f"_{layers}_{order}_{seed}", {}) if scaled and lr == "3e-3" else {}
            records.append(make_cell(layers, order, scaled, lr, seed, **{"loss": loss + more} | own))
    return records
