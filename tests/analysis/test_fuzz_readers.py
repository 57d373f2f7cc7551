"""The fuzzer of the readers: a fixed sample finds nothing, and planted faults are found."""

import random
import sys
import time
from dataclasses import replace

import pytest

from analysis.correctness import fuzz_readers
from analysis.correctness.fuzz_readers import Fuzzer, judge, run_traced
from analysis.correctness.fuzz_targets import TARGETS
from lmscale.checkpoint import metadata
from lmscale.checkpoint.tensor_file import TensorFileReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")


@pytest.mark.parametrize("name", TARGETS)
def test_a_fixed_sample_of_malformed_files_is_refused_in_one_line(name: str) -> None:
    fuzzer = Fuzzer(TARGETS[name], random.Random(f"7 {name}"))
    fuzzer.try_inputs(80)
    assert fuzzer.findings == {}
    assert fuzzer.counts()["inputs"] >= 40 and fuzzer.counts()["refused"] >= 5


def test_a_reader_that_checks_less_is_found(monkeypatch) -> None:
    monkeypatch.setattr(metadata, "_check_pieces", lambda *args: None)
    fuzzer = Fuzzer(TARGETS["checkpoint"], random.Random(7))
    fuzzer.try_inputs(150)
    assert fuzzer.findings


def test_memory_and_time_are_bounded(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(fuzz_readers, "MAX_SECONDS", 0.2)
    target = replace(TARGETS["tensors"], read=lambda folder: bytearray(8 << 30))  # more than a used heap has free
    with pytest.raises(RuntimeError, match="no seed of tensors is accepted"):
        Fuzzer(target, random.Random(1))

    def endless() -> None:
        while True:
            pass

    assert run_traced(endless)[2] == "more than 0 s"
    assert run_traced(lambda: time.sleep(0.5))[2] is None  # as if the machine were busy with something else
    _, refusal, finding = run_traced(lambda: TensorFileReader(tmp_path / "missing"))
    assert refusal.startswith("missing cannot be read") and finding is None
    assert judge(KeyError("x").with_traceback(None)).startswith("KeyError")
