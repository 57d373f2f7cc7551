"""`analysis/norm_order/study.py`: the cells of the plan, the chosen rates, a tiny cell run and repeated."""

import json
import math
import re
import subprocess
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from made_cells import write_cell
from omegaconf import OmegaConf

from analysis.norm_order import study
from analysis.norm_order.cells import read_cells
from analysis.norm_order.limits import read_limits
from analysis.norm_order.power import spread
from analysis.norm_order.run import run_cell
from analysis.norm_order.run_folder import read_statistics
from lmscale.config.pretrain import RunConfig
from lmscale.results import new_record, write_record

PLAN = Path(study.__file__).with_name("plan.md")
TINY = ["model.num_layers=2", "trainer.max_steps=30", "trainer.validate_every_steps=15", "micro_batch_size=16"]
TINY += ["global_batch_size=16", "logger.layer_statistics=[1,30]", "trainer.num_validation_samples=64"]


def cells_of(group: str) -> list[study.StudyCell]:
    return [cell for name, cell in study.read_groups() if name == group]


def test_the_cells_are_those_that_the_plan_requires() -> None:
    cells = [cell for _, cell in study.read_groups()]
    assert len({cell.name for cell in cells}) == len(cells)
    arms = Counter((cell.layers, cell.order) for cell in cells_of("losses"))
    assert arms == {(layers, order): 8 for layers in (12, 24) for order in ("pre", "post", "b2t")}
    assert {cell.lr for cell in cells_of("losses")} == {"chosen"}
    choosing = {cell.seed for cell in cells_of("selection") + cells_of("gpt_selection")}
    scored = {cell.seed for group in ("losses", "mechanism", "race", "gpt") for cell in cells_of(group)}
    assert len(choosing) == 2 and not choosing & scored and not (choosing | scored) & {1, 2, 3}
    pairs = [
        {replace(cell, order="post", warmup=100) for cell in cells_of(group)}
        for group in ("mechanism", "rescaled", "slow_start")
    ]
    assert pairs[0] == pairs[1] == pairs[2] and len(pairs[0]) == 8
    planned: dict[
        str, dict
    ] = {}  # without the rates that the grid's rule added: groups of a name that is there already
    for group in OmegaConf.to_container(OmegaConf.load(study.CELLS))["groups"]:
        planned.setdefault(group["name"], group["cells"])
    seconds = sum(
        study.CPU_SECONDS[layers] * math.prod(len(values) for key, values in lists.items() if key != "layers")
        for lists in planned.values()
        for layers in lists["layers"]
    )
    plan = " ".join(PLAN.read_text(encoding="utf-8").split())
    assert float(re.search(r"are expected to take ([\d.]+) in fp32", plan)[1]) == round(seconds / 3600, 1) < 30


def test_the_plan_has_the_spread_of_the_first_study() -> None:
    std, degrees = spread()
    assert f"{std:.4f} nats with {degrees} degrees of freedom" in PLAN.read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_kind_of_cell_is_a_run_with_fixed_attention_compilation_threads_and_precision(monkeypatch) -> None:
    monkeypatch.setenv("LMSCALE_DATA", "/texts")
    kinds = {(cell.family, cell.data, cell.order, cell.precision): cell for _, cell in study.read_groups()}
    with initialize_config_dir(str(study.ROOT / "conf"), version_base="1.3"):
        for (family, data, order, precision), cell in kinds.items():
            overrides = [o for o in replace(cell, lr="0.003").overrides() if not o.startswith("hydra.")]
            values = OmegaConf.to_container(compose("train", overrides), resolve=True)
            run = RunConfig.from_dict(values | {"run_dir": "/none"})
            assert (run.model.family, run.model.norm_order, run.precision.dtype) == (family, order, precision)
            assert run.data.path == (None if data == "embedded" else "/texts/race/race_train.jsonl.gz")
            sizes = (run.model.num_layers, run.model.hidden_size, run.model.max_position_embeddings)
            assert sizes == (cell.layers, 64, 32) and run.schedule.warmup_steps == cell.warmup
            pinned = (run.model.attention, run.compile, run.trainer.num_threads, run.model.scale_residual_init)
            assert pinned == ("exact", False, 1, True) and run.trainer.max_steps == 1000


def write(folder: Path, cell: study.StudyCell, loss: float) -> None:
    write_cell(folder, cell.layers, cell.order, True, cell.lr, cell.seed, loss)
    (folder / f"{cell.layers}_{cell.order}_True_{cell.lr}_{cell.seed}.json").rename(folder / f"{cell.name}.json")


@pytest.mark.slow
def test_the_rate_is_the_best_at_which_all_seeds_of_the_complete_selection_learned(tmp_path, monkeypatch) -> None:
    losses = {"0.00075": 4.3, "0.0015": 4.2, "0.003": 4.1, "0.006": 3.5, "0.012": 6.4}
    selection = [cell for cell in cells_of("selection") if (cell.layers, cell.order) == (12, "post")]
    for cell in selection[:-1]:
        write(tmp_path, cell, 6.4 if (cell.lr, cell.seed) == ("0.006", 102) else losses[cell.lr])
    waiting = next(cell for cell in cells_of("losses") if (cell.layers, cell.order) == (12, "post"))
    assert study.resolve(waiting, tmp_path) is None
    write(tmp_path, selection[-1], 6.4)
    assert study.resolve(waiting, tmp_path) == replace(waiting, lr="0.003")
    assert study.next_cell(tmp_path) == cells_of("selection")[0]
    for cell in selection[8:]:  # both seeds learn at the highest rate: the grid's rule adds the next one
        write(tmp_path, cell, 4.5)
    for cell in selection[6:8]:
        write(tmp_path, cell, 4.4)
    assert study.resolve(waiting, tmp_path) is None
    for cell in selection:
        write(tmp_path, cell, 6.4)
    assert study.resolve(waiting, tmp_path) is None  # lower rates are added
    monkeypatch.setattr(study, "read_limits", lambda cells: read_limits(cells).assign(added=[[]]))
    with pytest.raises(ValueError, match="a rate of selection must have only seeds that learned, but none has"):
        study.resolve(waiting, tmp_path)


def test_cells_run_two_at_a_time_once_each_and_in_order(tmp_path, monkeypatch) -> None:
    cells, started, together = cells_of("selection")[:5], [], threading.Barrier(2, timeout=60)

    def run(cell: study.StudyCell, _overrides: list[str], _outputs: Path, records: Path) -> None:
        started.append(cell)
        if len(started) <= 4:
            together.wait()  # for a second cell that runs beside it
        (records / f"{cell.name}.json").touch()

    monkeypatch.setattr(study, "run_cell", run)
    monkeypatch.setattr(study, "all_cells", lambda _records: [("selection", cell) for cell in cells])
    study.run_missing(2, 2, [], tmp_path, tmp_path)
    assert set(started) == set(cells[:2])
    study.run_missing(2, None, [], tmp_path, tmp_path)
    assert len(started) == 5 and set(started[2:4]) == set(cells[2:4]) and started[4] == cells[4]
    study.run_missing(2, None, [], tmp_path, tmp_path)
    assert len(started) == 5


def test_an_error_ends_the_study_after_the_cell_beside_it(tmp_path, monkeypatch) -> None:
    cells, finished, failed = cells_of("selection")[:4], [], threading.Event()

    def run(cell: study.StudyCell, *_: object) -> None:
        if cell == cells[0]:
            failed.set()
            raise RuntimeError(f"{cell.name} ended with code 1")
        assert failed.wait(60)
        time.sleep(1)  # until the error has reached the study
        finished.append(cell)

    monkeypatch.setattr(study, "run_cell", run)
    monkeypatch.setattr(study, "all_cells", lambda _records: [("selection", cell) for cell in cells])
    with pytest.raises(RuntimeError, match=f"{cells[0].name} ended with code 1"):
        study.run_missing(2, None, [], tmp_path, tmp_path)
    assert finished == [cells[1]]


@pytest.mark.slow
@pytest.mark.parametrize("family, least", [("bert", 4.2), ("gpt", 2.5)])
def test_a_cell_killed_half_way_starts_afresh_and_its_repetition_is_equal(tmp_path, capsys, family, least) -> None:
    cell = next(c for _, c in study.read_groups() if (c.family, c.lr) == (family, "0.003"))
    outputs, records = tmp_path / "outputs", tmp_path / "records"
    (outputs / cell.name).mkdir(parents=True)
    (outputs / cell.name / "metrics.csv").write_text("torn")
    run_cell(cell, TINY, outputs, records)
    path = records / f"{cell.name}.json"
    record = json.loads(path.read_text())
    config = record["config"]
    assert config["cell"] == {**vars(cell)} and config["overrides"] == [*cell.overrides(), *TINY]
    assert set(config["statistics"]) == {"1", "30"} and len(config["statistics"]["1"]["gradient_norm/mlp"]) == 2
    assert least < record["metrics"]["context_free_loss"]["value"] < record["metrics"]["scored_entropy"]["value"]
    assert read_cells([record])["steps"].tolist() == [30]
    assert study.repeat([cell.name], records, outputs, TINY) == 0
    assert "equal, bit by bit" in capsys.readouterr().out
    path.write_text(path.read_text().replace(config["losses_sha256"], "0" * 64))
    assert study.repeat([cell.name], records, outputs, TINY) == 1
    printed = capsys.readouterr().out
    assert f"{cell.name}: differs in losses_sha256" in printed
    assert f"capability {record['environment']['cpu_details']['capability']})" in printed
    assert record["environment"]["cpu_details"]["capability"] is not None  # of the torch that trained it
    with pytest.raises(ValueError, match="`--only` must name cells with a record, but is 12_mid"):
        study.repeat(["12_mid"], records, outputs, TINY)


def test_statistics_that_are_not_finite_can_be_recorded(tmp_path) -> None:
    sublayers = [{"layer": i, "sublayer": "mlp", "gradient_norm": norm} for i, norm in enumerate((2.0, float("nan")))]
    line = json.dumps({"step": 5, "sublayers": sublayers})
    (tmp_path / "layer_statistics.jsonl").write_text(line + "\n")
    found = read_statistics(tmp_path)
    assert found == {"5": {"gradient_norm/mlp": [2.0, None]}}
    write_record(new_record("cell", "scaled_down", {"statistics": found}, 1, {}), tmp_path / "record.json")


def test_cells_run_only_from_a_clean_checkout(tmp_path, monkeypatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(study, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=f"`lmscale` must be that of {tmp_path} .*, but is .*/src/lmscale"):
        study.require_clean()
    monkeypatch.setattr(study, "PACKAGE", tmp_path / "src" / "lmscale")
    (tmp_path / "record.json").write_text("new files do not count")
    study.require_clean()
    (tmp_path / "file").write_text("2")
    with pytest.raises(ValueError, match="the checkout must be clean, but has changes: M file"):
        study.require_clean()
