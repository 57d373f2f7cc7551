"""What the second study can detect: spread of the first study's differences, and the power of a paired t test.

    python analysis/norm_order/power.py    # the table of plan.md

The spread is the standard deviation of the paired differences between post-norm and pre-norm, pooled over the depths
at which both learned, with the scaled initialization. It is of few seeds, so the table also has its upper 80 % bound.
Power is by simulation with a fixed seed.
"""

import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from analysis.norm_order.cells import read_cells
from analysis.norm_order.run import RECORDS, read_folder

SEEDS, TESTS = 8, 12  # scored seeds per arm; tests of the family, of which Holm's first has level 0.05 / 12
DRAWS = 400_000
RATES = {6: ("3e-3", "3e-3"), 12: ("3e-3", "3e-3"), 24: ("3e-3", "1.5e-3")}  # of pre and post


def spread() -> tuple[float, int]:
    """Pooled standard deviation of post minus pre in nats, and its degrees of freedom."""
    cells = read_cells(read_folder(RECORDS / "norm_order"))
    total = degrees = 0.0
    for layers, rates in RATES.items():
        arms = []
        for order, lr in zip(("pre", "post"), rates, strict=True):
            rows = cells[(cells["layers"] == layers) & (cells["order"] == order) & cells["scaled"]]
            arms.append(rows[rows["lr"] == float(lr)].set_index("seed")["train_loss"])
        pairs = (arms[1] - arms[0]).dropna()
        total += (len(pairs) - 1) * statistics.variance(pairs)
        degrees += len(pairs) - 1
    return float((total / degrees) ** 0.5), int(degrees)


def upper_bound(std: float, degrees: int, generator: np.random.Generator) -> float:
    """The standard deviation that 80 % of one-sided intervals do not exceed."""
    return std * float((degrees / np.quantile(generator.chisquare(degrees, DRAWS), 0.2)) ** 0.5)


def power(effect: float, std: float, seeds: int, level: float, generator: np.random.Generator) -> float:
    """Probability that a two-sided paired t test at `level` finds a difference of `effect` nats."""
    critical = np.quantile(np.abs(generator.standard_t(seeds - 1, 5 * DRAWS)), 1 - level)
    draws = generator.normal(effect, std, (DRAWS, seeds))
    t = draws.mean(axis=1) / draws.std(axis=1, ddof=1) * seeds**0.5
    return float((np.abs(t) > critical).mean())


def main() -> None:
    """Print the table."""
    generator = np.random.default_rng(20)
    std, degrees = spread()
    wide = upper_bound(std, degrees, generator)
    print(f"spread {std:.4f} nats, {degrees} degrees of freedom; upper 80 % bound {wide:.4f}")
    print(f"{'effect, nats':>12}{'spread':>10}{'at 0.05':>10}{'at 0.05/12':>12}")
    for effect in (0.02, 0.03, 0.05, 0.10):
        for sigma in (std, wide):
            found = [power(effect, sigma, SEEDS, level, generator) for level in (0.05, 0.05 / TESTS)]
            print(f"{effect:>12.2f}{sigma:>10.4f}{found[0]:>10.2f}{found[1]:>12.2f}")


if __name__ == "__main__":
    main()
