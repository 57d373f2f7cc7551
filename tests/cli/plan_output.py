"""The output of `src/plan.py`, run in this process."""

import contextlib
import importlib.util
import io
import json

import pytest
from composed import composed
from entry_points import REPOSITORY

PAPER = ("model=gpt_8.3b", "parallel.tp_size=8", "parallel.dp_size=64", "cluster=dgx2h_v100")
_spec = importlib.util.spec_from_file_location("plan_script", REPOSITORY / "src" / "plan.py")
plan_script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plan_script)


def printed(*overrides: str) -> str:
    """The script's output, without the second that a process takes to start."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        plan_script.plan(composed("plan", *overrides) | {"overrides": list(overrides)})
    return output.getvalue()


def planned(*overrides: str) -> dict:
    return json.loads(printed("json=true", *overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        printed(*overrides)
    return str(caught.value)
