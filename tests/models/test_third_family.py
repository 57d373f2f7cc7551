"""A model family outside the package: it trains on tensor ranks, resumes over stages and can be planned; export is
refused."""

import json
import subprocess
from pathlib import Path

import pytest
import warm
from entry_points import REPOSITORY, TINY, environment
from runs import read_rows

from lmscale.checkpoint import Checkpoint, list_checkpoints
from lmscale.config import Layout, TransformerConfig
from lmscale.config.family import family_of
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.params import count_parameters, rank_parameters

NAME = "third_family.roberta"
RUN = (*TINY, "model=bert_tiny", "model.num_layers=2", f"model.family={NAME}", "model.hidden_dropout=0.1")
RUN += ("data=embedded", "precision=fp64")


def script(name: str, *overrides: str) -> subprocess.CompletedProcess:
    return warm.run([str(REPOSITORY / "src" / name), *overrides], REPOSITORY, environment(), timeout=300)


def losses(run_dir: Path, name: str = "train/loss") -> list[float]:
    return [row[name] for row in read_rows(run_dir) if name in row]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """`one`: one process. `parts`: two steps on two tensor ranks, and then the rest over two stages."""
    folder = tmp_path_factory.mktemp("roberta")
    parts = (*RUN, "model.attention=exact", f"hydra.run.dir={folder / 'parts'}")
    for overrides in (
        (*RUN, "model.attention=exact", f"hydra.run.dir={folder / 'one'}"),
        (*parts, "parallel.tp_size=2", "trainer.stop_after_steps=2"),
        (*parts, "parallel.pp_size=2", "resume=auto"),
    ):
        done = script("train.py", *overrides)
        assert done.returncode == 0, done.stderr
    return folder


def test_two_tensor_ranks_resumed_over_two_stages_equal_one_process(runs: Path) -> None:
    assert losses(runs / "parts") == pytest.approx(losses(runs / "one"), rel=1e-12) and len(losses(runs / "one")) == 3


@pytest.mark.parametrize("name", ["val/loss", "val/masked_loss", "val/penalty_loss", "train/penalty_loss"])
def test_each_of_its_loss_terms_has_a_column(runs: Path, name: str) -> None:
    assert len(losses(runs / "one", name)) == (3 if name.startswith("train") else 1)
    assert losses(runs / "parts", name)[-1] == pytest.approx(losses(runs / "one", name)[-1], rel=1e-12)


def test_its_checkpoint_names_the_family(runs: Path) -> None:
    metadata = Checkpoint.open(list_checkpoints(runs / "parts" / "checkpoints")[-1]).metadata
    config = TransformerConfig.from_dict(metadata.model)
    assert config.family == NAME and metadata.layout["pp_size"] == 2
    assert "model/transformer.token_type_embedding" not in metadata.tensors


def test_the_export_to_hugging_face_is_refused_in_one_line(runs: Path, tmp_path: Path) -> None:
    done = script("convert.py", f"source={runs / 'parts'}", f"target={tmp_path / 'hf'}", "format=hugging_face")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert f"`family` must be one that Hugging Face has here (gpt, bert), but is {NAME}" in done.stderr


def test_it_is_planned_and_its_formulas_count_the_real_module() -> None:
    done = script("plan.py", "model=bert_336m", f"model.family={NAME}", "parallel.tp_size=2", "json=true")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    config = TransformerConfig(NAME, 3, 24, 4, 99, 13, vocab_multiple=8)
    for tp_size in (1, 2):
        model = build_model(config, ParallelContext(tp_size=tp_size), seed=None, device="meta")
        sizes = [param.numel() for param in model.parameters()]
        layout = Layout(tp_size=tp_size)
        assert count_parameters(config, layout).per_rank == sum(sizes)
        assert sorted(each.size for each in rank_parameters(config, layout)) == sorted(sizes)


def test_an_unknown_family_is_refused_in_one_line() -> None:
    known = "`family` must be one of gpt, bert, or package.module of a module with FAMILY, but is"
    for name in ("t5", "os.path", "no.such.module", "", "..gpt"):
        with pytest.raises(ValueError, match=f"^{known} '{name}'$"):
            TransformerConfig(name, 2, 24, 4, 99, 13)
    assert family_of(NAME).hugging_face is None
