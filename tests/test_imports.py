"""Import rules, checked in the source with `ast`; `python tests/test_imports.py` prints the table of the docs."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "lmscale"

# Packages and modules of lmscale from the bottom up: what it is for, what it may import, what it must never import.
FRAMEWORKS = {"torch", "lightning", "hydra", "omegaconf"}
RULES: dict[str, tuple[str, set[str], set[str]]] = {
    "config": ("every dataclass of every entry point, and every rule about sizes", {"partition"}, FRAMEWORKS),
    "partition": ("how layers, gradients, optimizer state and the rows of the loss are divided", set(), FRAMEWORKS),
    "hashing": ("SplitMix64, in NumPy and torch", set(), FRAMEWORKS),
    "shared_files": ("files that several processes use: atomic writes and locks", set(), FRAMEWORKS),
    "output": ("the output of a command, on a full disk and in any encoding too", set(), FRAMEWORKS),
    "kernels": ("which kernels compute the layers; the only importer of apex", set(), FRAMEWORKS),
    "planner": (
        "parameters, FLOPs, memory, collectives, step time, plans",
        {"config", "partition"},
        FRAMEWORKS,
    ),
    "paper": ("distinguishes a run of the paper from a smaller one", set(), FRAMEWORKS),
    "__main__": ("the `lmscale` command: runs an entry point", {"config"}, FRAMEWORKS),
    "parallel": (
        "tensor parallelism: f, g, layers, loss, norm, initialization, dropout; stages of a pipeline",
        {"hashing", "partition"},
        FRAMEWORKS - {"torch"},
    ),
    "runtime": (
        "starting ranks and ending them: watchdog, signals, locks, exit codes; facts and settings of the machine",
        {"output", "parallel", "shared_files"},
        FRAMEWORKS - {"torch"},
    ),
    "results": ("one run, one JSON record", {"config", "runtime", "shared_files"}, FRAMEWORKS),
    "cli": (
        "what entry points share: Hydra in, one-line errors and exit codes out; the reference of their keys",
        {"config", "output", "results", "runtime"},
        {"torch", "lightning"},
    ),
    "models": (
        "BERT and GPT",
        {"config", "kernels", "parallel"},
        {"torch.distributed"} | FRAMEWORKS - {"torch"},
    ),
    "checkpoint": (
        "checkpoints on disk: format, any layout, checksums",
        {"config", "data", "models", "parallel", "shared_files"},
        {"torch.distributed"} | FRAMEWORKS - {"torch"},
    ),
    "hugging_face": (
        "models of Hugging Face: configuration, weights, conversion both ways",
        {"checkpoint", "config", "models", "parallel"},
        {"torch.distributed"} | FRAMEWORKS - {"torch"},
    ),
    "trained_model": (
        "a trained model of either form, loaded at any layout",
        {"checkpoint", "config", "data", "hugging_face", "kernels", "models", "parallel", "runtime"},
        {"torch.distributed"} | FRAMEWORKS - {"torch"},
    ),
    "text": ("texts on disk: which files are read, their formats, documents, tables", set(), FRAMEWORKS),
    "data": ("token files to samples", {"config", "hashing", "text", "shared_files"}, {"hydra", "omegaconf"}),
    "corpus": (
        "raw text to token files",
        {"config", "data", "hashing", "runtime", "shared_files", "text"},
        FRAMEWORKS,
    ),
    "evaluation": (
        "zero-shot evaluation, text generation",
        {
            "config",
            "hashing",
            "parallel",
            "models",
            "text",
            "data",
            "trained_model",
            "results",
            "paper",
            "runtime",
        },
        FRAMEWORKS - {"torch"},
    ),
    "training": (
        "pretraining: the step, the run around it, what goes to disk",
        {
            "config",
            "partition",
            "results",
            "kernels",
            "planner",
            "parallel",
            "models",
            "checkpoint",
            "data",
            "runtime",
            "shared_files",
            "trained_model",
        },
        {"hydra", "omegaconf"},
    ),
    "finetune": (
        "finetuning: heads, tasks and their data",
        {
            "config",
            "results",
            "paper",
            "parallel",
            "models",
            "checkpoint",
            "data",
            "hugging_face",
            "runtime",
            "shared_files",
            "text",
            "training",
        },
        {"hydra", "omegaconf"},
    ),
}


def module_name(path: Path) -> str:
    """`lmscale.parallel.layers` of a file; a package's `__init__.py` is the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Dotted names of the modules that a file imports, also inside functions; for lmscale the files.

    Args:
        modules: all modules of lmscale.
    """
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # a module, or a name in one
                longer = f"{start}.{alias.name}"
                names.add(longer if longer in modules or not start.startswith("lmscale") else start)
    return names


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
IMPORTS = {name: imports_of(path, set(FILES)) for name, path in FILES.items()}


def part_of(name: str) -> str:
    """The top-level package or module: `parallel` of `lmscale.parallel.layers`."""
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("part", RULES)
def test_a_package_imports_only_what_it_may(part) -> None:
    _, allowed, forbidden = RULES[part]
    files = [name for name in FILES if part_of(name) == part]
    assert files
    for name in files:
        prefixes = {".".join(found.split(".")[:n]) for found in IMPORTS[name] for n in (1, 2)}
        assert not prefixes & forbidden, (name, prefixes & forbidden)
        ours = {part_of(found) for found in IMPORTS[name] if found.startswith("lmscale")} - {part, ""}
        assert ours <= allowed, (name, ours - allowed)


def test_every_package_has_a_rule() -> None:
    assert {part_of(name) for name in FILES} - {""} == set(RULES)


def test_only_the_datamodule_of_the_data_package_imports_lightning() -> None:
    found = {name for name in FILES if part_of(name) == "data" and "lightning" in IMPORTS[name]}
    assert found == {"lmscale.data.datamodule"}


def test_there_are_no_circular_imports() -> None:
    graph = {}
    for name, imported in IMPORTS.items():
        found = {other for other in imported if other in FILES}
        # An import runs the `__init__` of its packages first, except those that contain this file.
        parents = {".".join(other.split(".")[:n]) for other in found for n in range(1, other.count(".") + 1)}
        own = {".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 2)}
        graph[name] = (found | (parents & set(FILES))) - own
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_entry_scripts_are_thin() -> None:
    for script in PACKAGE.parent.glob("*.py"):
        assert len(script.read_text(encoding="utf-8").splitlines()) < 100, script.name


def test_apex_is_imported_in_one_file() -> None:
    found = {name for name, imported in IMPORTS.items() if any(other.split(".")[0] == "apex" for other in imported)}
    assert found == {"lmscale.kernels"}


def imported_folders(folder: Path) -> set[str]:
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("analysis"):
                parts = node.module.split(".")
                names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return names - {folder.name}


def test_the_folders_of_analysis_import_each_other_one_way() -> None:
    folders = [folder for folder in (PACKAGE.parents[1] / "analysis").iterdir() if any(folder.rglob("*.py"))]
    graph = {folder.name: imported_folders(folder) for folder in folders}
    assert "pages" in list(TopologicalSorter(graph).static_order())  # a circle raises CycleError
    assert not any("pages" in imported for imported in graph.values())


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by name, and stops at the second."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def table() -> str:
    """The rules as the docs show them."""
    rows = ["| package | what it is for | may import | never |", "|---|---|---|---|"]
    for part, (purpose, allowed, forbidden) in RULES.items():
        cells = [", ".join(f"`{name}`" for name in sorted(names)) or "-" for names in (allowed, forbidden)]
        rows.append(f"| `{part}` | {purpose} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
