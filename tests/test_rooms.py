"""Who may import whom: the table in CONTRIBUTING.md, read from the source with `ast`."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "lmscale"

# room -> top-level modules and rooms of lmscale it must not import (rooms are written with a leading dot)
FORBIDDEN = {
    "config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training", ".perf"},
    "run_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training", ".perf"},
    "data_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training", ".perf"},
    "training_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training"},
    "convert_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training"},
    "corpus_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training"},
    "generate_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training"},
    "finetune_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training"},
    "plan_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training"},
    "zero_shot_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training"},
    "from_plain": {"torch", "hydra", "omegaconf", "lightning", ".config", ".parallel", ".models", ".data", ".training"},
    "fused": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training", ".perf"},
    "parallel": {"lightning", "hydra", "omegaconf", ".models", ".data", ".training", ".config", ".perf"},
    "models": {"torch.distributed", "lightning", "hydra", "omegaconf", ".data", ".training", ".perf"},
    "checkpoint": {"torch.distributed", "lightning", "hydra", "omegaconf", ".data", ".training", ".perf"},
    "data": {"hydra", "omegaconf", ".models", ".parallel", ".training", ".perf"},
    "corpus": {"torch", "lightning", "hydra", "omegaconf", ".models", ".parallel", ".training", ".perf"},
    "evaluation": {"lightning", "hydra", "omegaconf", ".training"},
    "training": {"hydra", "omegaconf", ".door"},
    "finetune": {"hydra", "omegaconf", ".door"},
    "bench": {"hydra", "omegaconf", ".door"},
    "bench_config": {"torch", "hydra", "omegaconf", "lightning", ".parallel", ".models", ".data", ".training"},
    "report": {"torch", "lightning", "hydra", "omegaconf", ".parallel", ".models", ".data", ".training"},
    "perf": {"torch", "lightning", "hydra", "omegaconf", ".parallel", ".models", ".data", ".training"},
    "results": {"torch", "lightning", "hydra", "omegaconf"},
    "door": {"torch", "lightning"},
}


def imported(path: Path) -> set[str]:
    """Modules a file imports: `torch`, `torch.distributed`, and `.room` for rooms of lmscale."""
    depth = len(path.relative_to(PACKAGE).parts)  # dots that lead to the package
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom) and node.level == depth:
            module = node.module.split(".")[0] if node.module else None
            names |= {f".{module}"} if module else {f".{alias.name}" for alias in node.names}
    prefixes = {".".join(name.split(".")[:n]) for name in names if not name.startswith(".") for n in (1, 2)}
    return names | prefixes


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_keeps_to_its_imports(room) -> None:
    files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").is_file() else sorted((PACKAGE / room).rglob("*.py"))
    assert files
    wrong = {str(f.relative_to(PACKAGE)): sorted(found) for f in files if (found := imported(f) & FORBIDDEN[room])}
    # Only the datamodule of the data room may know Lightning.
    if room == "data":
        others = [f for f in files if f.name != "datamodule.py" and "lightning" in imported(f)]
        assert others == []
    assert wrong == {}


def test_every_room_is_in_the_table() -> None:
    rooms = {p.stem for p in PACKAGE.iterdir() if p.name not in ("__init__.py", "__pycache__")}
    assert rooms == set(FORBIDDEN)


def test_entry_scripts_are_thin() -> None:
    for script in PACKAGE.parent.glob("*.py"):
        assert len(script.read_text(encoding="utf-8").splitlines()) < 100, script.name


def test_apex_is_imported_through_one_door() -> None:
    found = {path.name for path in PACKAGE.rglob("*.py") if "apex" in {n.split(".")[0] for n in imported(path)}}
    assert found == {"fused.py"}


def test_apex_is_never_a_pip_dependency() -> None:
    text = (PACKAGE.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert "apex" not in text
