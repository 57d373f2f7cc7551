"""A model's configuration: its family, named only in the family's folder, and the values that a run resolves."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from runs import tiny_run

from lmscale.config import TransformerConfig
from lmscale.config.family import BUILT_IN, check_loads, family_of, load
from lmscale.config.model import ModelConfig
from lmscale.config.pretrain import RunConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext

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


OPEN = ModelConfig("gpt", 1, 8, 2, None, 16, vocab_multiple=8, recompute="auto", attention="auto", name="tiny")


def test_an_unresolved_config_is_resolved_once_and_then_built() -> None:
    for unresolved in ((None, "exact", "none"), (9, "auto", "none"), (9, "exact", "auto")):
        with pytest.raises(ValueError, match="must be .*, but is '?(null|auto)"):
            OPEN.resolve(*unresolved)
    resolved = OPEN.resolve(9, "exact", "full")
    assert (resolved.padded_vocab_size, resolved.recompute, resolved.attention) == (16, "full", "exact")
    assert resolved.resolve(7, "sdpa", "none") == resolved
    build_model(resolved, ParallelContext(), seed=1)


@pytest.mark.parametrize("name", ["initializer_std", "layer_norm_eps"])
def test_an_infinite_number_is_refused(name) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be .*finite number.*, but is inf"):
        dataclasses.replace(OPEN, **{name: float("inf")})


def test_a_models_name_is_ignored_and_not_in_checkpoints() -> None:
    assert dataclasses.replace(OPEN, name="other") == OPEN
    assert "name" not in OPEN.to_dict()
    resolved = OPEN.resolve(9)
    assert TransformerConfig.from_dict(resolved.to_dict()) == resolved
