"""The output of `src/plan.py`, run in this process."""

import contextlib
import importlib.util
import io
import json

import pytest
from entry_points import REPOSITORY
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

PAPER = ("model=gpt_8.3b", "parallel.tp_size=8", "parallel.dp_size=64", "cluster=dgx2h_v100")
_spec = importlib.util.spec_from_file_location("plan_script", REPOSITORY / "src" / "plan.py")
plan_script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plan_script)


def printed(*overrides: str) -> str:
    """The script's output, without the second that a process takes to start."""
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        composed = compose("plan", list(overrides))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        plan_script.plan(values | {"overrides": list(overrides)})
    return output.getvalue()


def planned(*overrides: str) -> dict:
    return json.loads(printed("json=true", *overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        printed(*overrides)
    return str(caught.value)
