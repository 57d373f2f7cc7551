"""Fit the cost model's four constants to half of the paper's scaling cells, and test it on everything else.

    python analysis/scaling/fit_cost_model.py

Prints every cell beside the paper's value, the blind test on Megatron-LM's tables of September 2020, and the result of
fitting the other half instead. Writes a record. conf/cluster/dgx2h_v100.yaml holds the rounded constants.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np
from scipy import optimize

from analysis.scaling.study import (
    CELLS,
    LATER_SHAPES,
    PETAFLOPS_512,
    TRAINING_DAYS,
    anchor,
    predict_cell,
    predict_days,
    predict_later,
    predict_petaflops,
    scaled_to,
    with_rates,
)
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.results import new_record, record_argument, write_record

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "analysis" / "scaling" / "records" / "cost_model.json"
# Constant -> unit, initial value, lower and upper bound, and the reason for the bounds.
CONSTANTS = {
    "memory_share": ("of the copy rate", 0.7, 0.5, 1.0, "a pass is made at that rate; several tensors and reductions"),
    "launch_us": ("us", 25.0, 0.0, 50.0, "a kernel of eager code and its Python"),
    "tensor_bandwidth_gb_s": ("GB/s", 80.0, 50.0, 150.0, "six NVLinks of 25 GB/s each way; a third of them at least"),
    "data_bandwidth_gb_s": ("GB/s", 40.0, 6.25, 100.0, "from one 100 Gb/s link between two GPUs to all of a node's"),
}
V100 = load_cluster(ROOT / "conf" / "cluster" / "dgx2h_v100.yaml")  # of which `fit` replaces the constants
# DGX A100 of 2020: memory at 1,555 for 900 GB/s, NVLink at 300 for 150 GB/s each way.
A100_PEAK, COPY_RATIO, LINK_RATIO = 312.0, 1555 / 900, 2.0


def fit(roles: tuple[str, ...] = ("fit",)) -> Cluster:
    """Fit the constants' logarithms to the cells of `roles` by bounded least squares; returns the anchored cluster."""
    cells = [cell for cell in CELLS if cell.role in roles]
    low, high = (np.log([max(entry[i], 1e-3) for entry in CONSTANTS.values()]) for i in (2, 3))

    def cluster_at(logs: np.ndarray) -> Cluster:
        return anchor(with_rates(V100, **dict(zip(CONSTANTS, np.exp(logs).tolist(), strict=True))))

    def misses(logs: np.ndarray) -> np.ndarray:
        cluster = cluster_at(logs)
        return np.array([predict_cell(cell, cluster) - cell.paper for cell in cells])

    start = np.log([entry[1] for entry in CONSTANTS.values()])
    return cluster_at(optimize.least_squares(misses, start, bounds=(low, high), xtol=1e-12, ftol=1e-12).x)


def measure(cluster: Cluster) -> dict[str, dict]:
    """All residuals of the model, as the metrics of a record."""
    rates = dataclasses.asdict(cluster.calibration) | dataclasses.asdict(cluster.roofline)
    metrics = {name: {"value": rates[name], "unit": entry[0]} for name, entry in CONSTANTS.items()}
    metrics["product_share"] = {"value": rates["product_share"], "unit": "of the peak"}
    for cell in CELLS:
        residual = predict_cell(cell, cluster) - cell.paper
        metrics[f"{cell.role}/{cell.table}, {cell.label}"] = {"value": residual, "unit": "points over the paper"}
    petaflops = predict_petaflops(cluster)
    metrics["512 GPUs"] = {"value": petaflops / PETAFLOPS_512 - 1, "unit": "of the paper's 15.1 PFLOP/s"}
    for cell in TRAINING_DAYS:
        for how, days in zip(("steps alone", "with validation"), predict_days(cell, cluster), strict=True):
            miss = {"value": days / cell.paper - 1, "unit": "of the paper's days"}
            metrics[f"Table 2, {cell.size}, {how}"] = miss
    return metrics | blind(cluster)


def log_linear() -> dict[str, dict]:
    """The baseline of the held-out cells: residuals of a line in the logarithm of the number of GPUs.

    It goes through the fit cells of the same curve and, without data parallelism, through 100 % at one GPU. Table 7 has
    one number of GPUs and no such line.
    """
    metrics = {}
    for held_out in (cell for cell in CELLS if cell.role == "held out"):
        curve = [c for c in CELLS if (c.table, c.dp_size, c.role) == (held_out.table, held_out.dp_size, "fit")]
        points = {c.layout.world_size: c.paper for c in curve} | ({1: 100.0} if held_out.dp_size == 1 else {})
        if held_out.table != "Table 7":
            line = np.polyfit(np.log(list(points)), list(points.values()), 1)
            residual = float(np.polyval(line, np.log(held_out.layout.world_size))) - held_out.paper
            metrics[f"log-linear/{held_out.table}, {held_out.label}"] = {
                "value": residual,
                "unit": "points over the paper",
            }
    return metrics


def blind(cluster: Cluster) -> dict[str, dict]:
    """Residuals on the tables of 2020, which enter no constant except through their one-GPU time."""
    a100 = scaled_to(cluster, A100_PEAK, COPY_RATIO, LINK_RATIO)
    tables = {
        "V100": (cluster, "v100", "v100_ms", 8, 1),
        "A100": (a100, "a100", "a100_ms", 16, 1),
        "A100, 128 data ranks": (a100, "a100_128_way", "a100_ms", 16, 128),
    }
    metrics = {}
    for name, (machine, column, times, batch, dp_size) in tables.items():
        share, rows = predict_later(machine, getattr(LATER_SHAPES[0], times), batch, dp_size)
        metrics[f"blind/{name}, share"] = {"value": share, "unit": "of the paper's passes and launches"}
        for shape, percent in zip(LATER_SHAPES, rows, strict=True):
            if (shape.tp_size, dp_size) != (1, 1):
                metrics[f"blind/{name}, {shape.tp_size * dp_size} GPUs"] = {
                    "value": percent - getattr(shape, column),
                    "unit": "points over the README of 2020",
                }
    return metrics


def main() -> int:
    """Fit the constants, print the residuals and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, default=RECORD)
    options = parser.parse_args()
    cluster = fit()
    metrics = measure(cluster)
    other = measure(fit(("held out",)))
    for name, entry in metrics.items():
        print(f"{name:<44}{entry['value']:>10.3f} {entry['unit']:<32} other half: {other[name]['value']:>9.3f}")
    baseline = log_linear()
    for name, entry in baseline.items():
        print(f"{name:<44}{entry['value']:>10.3f} {entry['unit']}")
    metrics |= {f"other half/{name}": entry for name, entry in other.items()} | baseline
    config = {
        "ranges": {name: {"unit": e[0], "low": e[2], "high": e[3], "why": e[4]} for name, e in CONSTANTS.items()},
        "anchor": "the 1.2 B model at 39 TFLOP/s on one GPU sets product_share",
        "cells": [dataclasses.asdict(cell) for cell in CELLS],
        "cluster": dataclasses.asdict(cluster),
    }
    write_record(new_record("cost_model", "modelled", config, None, metrics), options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
