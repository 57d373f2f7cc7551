"""A family's name appears only in its own folder; all other code reads its description."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from runs import tiny_run

from lmscale.config import TransformerConfig
from lmscale.config.family import BUILT_IN, check_loads, family_of, load
from lmscale.config.pretrain import RunConfig

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "lmscale"
# The only places that may name a family: its folder and its samples.
FOLDERS = [f"models/{name}/" for name in BUILT_IN]
SAMPLES = [family_of(name).samples.split(":")[0].removeprefix("lmscale.").replace(".", "/") for name in BUILT_IN]
EXEMPT = (*FOLDERS, *SAMPLES)


def test_no_other_file_names_a_family() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(EXEMPT):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found += [(name, n.lineno) for n in nodes if isinstance(n, ast.Constant) and n.value in BUILT_IN]
    assert found == []


def test_built_in_families_match_the_folders_and_everything_they_reference_exists() -> None:
    assert BUILT_IN == ("gpt", "bert")
    for name in BUILT_IN:
        family = family_of(name)
        assert family.corpus.name == name
        for path in (family.model, family.loss, family.samples, family.hugging_face):
            assert load(path) is not None


def test_a_description_imports_no_torch() -> None:
    code = """
import sys
from lmscale.config import TransformerConfig
from lmscale.config.family import BUILT_IN, family_of
for name in BUILT_IN:
    TransformerConfig(name, 2, 16, 2, 50, 8).placement, family_of(name)
import lmscale.planner.plan, lmscale.models.gpt, lmscale.models.bert, lmscale.models.norm_placement
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_use_the_key_architecture_and_both_names_are_read() -> None:
    config = TransformerConfig("gpt", 2, 16, 2, 50, 8, norm_order="post")
    values = config.to_dict()
    assert values["architecture"] == "gpt" and "family" not in values  # as in the first checkpoints and records
    assert TransformerConfig.from_dict(values) == config
    del values["architecture"]
    assert TransformerConfig.from_dict(values | {"family": "gpt"}) == config
    run = tiny_run("bert", Path("run"))
    assert run.to_dict()["model"]["architecture"] == "bert"  # in a run folder's config.json
    assert RunConfig.from_dict(run.to_dict()) == run


@pytest.mark.parametrize(
    "code, message",
    [
        ("raise RuntimeError('no such lab')", "fails to import: RuntimeError: no such lab"),
        ("def f(:", "fails to import: SyntaxError"),
        ("import sys; sys.exit(3)", "fails to import: SystemExit: 3"),
    ],
)
def test_a_module_that_fails_is_refused_in_one_line(tmp_path, monkeypatch, code, message) -> None:
    name = f"lab_{abs(hash(code))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "broken.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        family_of(f"{name}.broken")
    assert "\n" not in str(refused.value)


def test_a_family_whose_loss_is_missing_is_refused_before_a_run(tmp_path, monkeypatch) -> None:
    (tmp_path / "lab_loss").mkdir()
    code = "import dataclasses\nfrom lmscale.models.gpt.family import FAMILY as GPT\n"
    code += "FAMILY = dataclasses.replace(GPT, loss='lab_loss.nowhere')\n"
    (tmp_path / "lab_loss" / "family.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="`model.family` .* lab_loss.nowhere of 'lab_loss.family' fails"):
        check_loads("lab_loss.family")
