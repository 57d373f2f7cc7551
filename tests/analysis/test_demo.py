"""`make demo`: its n-gram baseline agrees with counts by hand; a signal ends its training, which saves first."""

import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import warm

from analysis import running
from analysis.demo import demo
from analysis.demo.ngram import context_free_losses, kneser_ney_losses

V = 7


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_of_all_ids_after_any_context_sum_to_one(order) -> None:
    train = np.random.default_rng(0).integers(0, V - 1, 200) ** 2 % (V - 1)  # V - 1 never occurs
    for context in ([0, 1], [4, 4], [V - 1, 3], [V - 1, V - 1]):
        losses = [kneser_ney_losses(train, np.array([*context, last]), V, order)[-1] for last in range(V)]
        assert math.isclose(sum(math.exp(-loss) for loss in losses), 1.0, rel_tol=1e-12)


def test_a_bigram_of_six_ids_agrees_with_a_count_by_hand() -> None:
    # Bigrams of 0 1 0 1 0 2: 01 twice, 10 twice, 02 once. n1 = 1, n2 = 2: discount 1/5.
    # Left neighbours: 0, 1 and 2 have one each. n1 = 3, n2 = 0: discount 1, so the lower order is uniform, 1/3.
    losses = kneser_ney_losses(np.array([0, 1, 0, 1, 0, 2]), np.array([0, 1, 1, 2]), 3, 2)
    after_0, after_1 = (2 - 0.2) / 3 + 0.2 * 2 / 3 / 3, 0.2 * 1 / 2 / 3
    assert np.allclose(np.exp(-losses), [1 / 3, after_0, after_1, after_1], rtol=1e-12)


def test_a_longer_context_lowers_the_loss_of_text_that_depends_on_it() -> None:
    text = np.array([0, 0, 1, 1] * 100)  # two ids before determine the next one, one id does not
    one, two, three = (kneser_ney_losses(text, text[:40], V, order).mean() for order in (1, 2, 3))
    assert one > math.log(2) - 0.05 and two > math.log(2) - 0.1 and three < 0.15


def test_without_context_bert_knows_the_frequencies_and_what_its_position_shows() -> None:
    """Against the posterior of every pair of shown and scored id; V - 1 is [MASK], and never scored."""
    train, mask = np.array([0, 0, 0, 1, 1, 2, 3, 4, 5]), V - 1
    frequency = (np.bincount(train, minlength=V) + 1.0) / (len(train) + V)
    joint = 0.1 * frequency[None, :] / V + 0.1 * np.diag(frequency)  # [shown, scored]: drawn at random, or left
    expected = joint / joint.sum(axis=1, keepdims=True)
    expected[mask] = frequency  # a random id is [MASK] too rarely to count
    shown, scored = (ids.ravel() for ids in np.indices((V, V)))
    losses = context_free_losses(train, shown, scored, mask, V)
    np.testing.assert_allclose(np.exp(-losses), expected.ravel(), rtol=1e-12)


STAND_IN = """
import os, signal, sys, time
from pathlib import Path
state = Path(__file__).with_name("state")
def save(number, frame):
    time.sleep(0.5)
    state.write_text("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
state.with_name("pid").write_text(f"{os.getpid()}\\n")
time.sleep(60)
"""


def run_demo(clone: Path) -> None:
    """The demo in this process, with the entry points of another clone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    demo.REPOSITORY = running.ROOT = clone
    demo.sys.argv = ["demo.py"]
    demo.main()


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 1)])
def test_a_signal_ends_the_training_too_which_saves_first(tmp_path, number: signal.Signals, code: int) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(STAND_IN)
    process, started = warm.context.Process(target=run_demo, args=(tmp_path,)), tmp_path / "src" / "pid"
    process.start()
    while not started.is_file() or not started.read_text().endswith("\n"):
        assert process.is_alive()
        time.sleep(0.05)
    pid = int(started.read_text())
    if number == signal.SIGINT:  # a terminal sends it to both
        os.kill(pid, number)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code and (tmp_path / "src" / "state").read_text() == "saved"
    assert not os.path.exists(f"/proc/{pid}")
