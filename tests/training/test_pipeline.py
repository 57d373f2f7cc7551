"""Pretraining over the stages of a pipeline equals that of one process (fp64, 1e-12)."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from runs import DROPOUT, MUP, ONE, SEQUENCE, assert_equal_runs, read_rows, run_jobs, run_layouts, tiny_run
from safetensors import safe_open

from lmscale.checkpoint import list_checkpoints
from lmscale.config import Layout, TransformerConfig
from lmscale.config.family import family_of
from lmscale.config.model import ModelConfig
from lmscale.config.zero_shot import LambadaConfig, ZeroShotConfig
from lmscale.parallel import ParallelContext
from lmscale.runtime.exit_codes import REPLICAS_DIFFER
from lmscale.training.module import PretrainModule
from lmscale.training.step import optimizer

BOUND = 1e-12
STATISTICS = {"logger__layer_grad_norms": True, "logger__layer_statistics": [2]}
COMPLETEP = MUP | {"model__parametrization": "completep", "model__base_num_layers": 2}
# By layout (tp, pp, dp): runs of 5 layers, with as many micro-batches as p - 1, p, and 2 p + 1 or more.
CASES = {
    (1, 2, 1): {
        "gpt-5-micro-batches": ("gpt", {"micro_batch_size": 2, "global_batch_size": 10, **STATISTICS, **COMPLETEP}),
        "bert-post-1-micro-batch": ("bert", {"model__norm_order": "post", "model__recompute": "full", **MUP}),
    },
    (1, 3, 1): {"gpt-uneven": ("gpt", {"micro_batch_size": 4, "global_batch_size": 12, **DROPOUT, **MUP})},
    (2, 2, 1): {"bert-sequence-parallel": ("bert", {"micro_batch_size": 1, **DROPOUT, **SEQUENCE, **COMPLETEP})},
    (1, 2, 2): {"gpt-zero1": ("gpt", {"parallel__zero1": True, "micro_batch_size": 1})},
}
SLOW = {
    (1, 2, 1): {
        f"bert-{order}": ("bert", {"model__norm_order": order, "micro_batch_size": 2, "model__recompute": "selective"})
        for order in ("pre", "deepnorm", "peri", "b2t", "mix")
    }
    | {"gpt-compiled": ("gpt", {"compile": True, "micro_batch_size": 2, **DROPOUT})}
    | {"gpt-means": ("gpt", {"loss_reduction": "mean_of_means", "micro_batch_size": 2, "trainer__max_steps": 20})},
    (1, 4, 1): {"bert-3-micro-batches": ("bert", {"micro_batch_size": 2, "global_batch_size": 6})},
    (2, 2, 1): {
        "gpt-padded-heads": (
            "gpt",
            {"model__num_attention_heads": 3, "parallel__pad_heads": True, "micro_batch_size": 2},
        ),
    },
    (2, 2, 2): {
        "gpt-all": ("gpt", {"parallel__zero1": True, "micro_batch_size": 1, **DROPOUT, **SEQUENCE}),
        "bert-halves": ("bert", {"parallel__batch_halves": True, "micro_batch_size": 2, **DROPOUT}),
    },
}
ALL = [(layout, name) for cases in (CASES, SLOW) for layout, names in cases.items() for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


def train_all(root: Path, cases: dict[tuple[int, int, int], dict[str, tuple[str, dict]]]) -> None:
    """Train every case in one process and at its layout."""
    several = {"model__num_layers": 5}
    run_layouts(
        (family, root / name, several | changes, [layout])
        for layout, names in cases.items()
        for name, (family, changes) in names.items()
    )


@pytest.fixture(scope="module")
def quick(folder) -> Path:
    train_all(folder / "quick", CASES)
    return folder / "quick"


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] not in CASES.get(case[0], {}))) for case in ALL],
)
def test_a_run_over_stages_equals_that_of_one_process(request, folder, layout, name) -> None:
    if name in CASES.get(layout, {}):
        root = request.getfixturevalue("quick") / name
    else:
        train_all(folder, {layout: {name: SLOW[layout][name]}})
        root = folder / name
    one, stages = root / ONE, root / "{}x{}x{}".format(*layout)
    assert_equal_runs(one, stages, BOUND, moments=100.0)
    alone, of_each = (read_rows(path)[-1] for path in (one, stages))
    rates = [row["tflops_per_s_per_device"] / row["tokens_per_s"] for row in (alone, of_each)]
    assert rates[0] == pytest.approx(rates[1] * math.prod(layout))
    if (one / "layer_statistics.jsonl").exists():
        found, other = (json.loads((path / "layer_statistics.jsonl").read_text()) for path in (one, stages))
        assert len(found["sublayers"]) == 10
        for entry, twin in zip(found["sublayers"], other["sublayers"], strict=True):
            assert entry.pop("sublayer") == twin.pop("sublayer")
            assert entry == pytest.approx(twin, rel=1e-9)


def test_each_stage_writes_its_own_layers_and_the_tied_weight_is_written_once(quick) -> None:
    path = list_checkpoints(quick / "gpt-uneven" / "1x3x1" / "checkpoints")[-1]
    written = []
    for rank in range(3):
        with safe_open(path / f"rank_{rank}_of_3.safetensors", "pt") as file:
            written.append({key.removeprefix("model/") for key in file.keys() if key.startswith("model/")})  # noqa: SIM118
    layers = [{int(name.split(".")[2]) for name in names if ".layers." in name} for names in written]
    assert layers == [{0, 1}, {2, 3}, {4}]  # the output projection makes the last stage slower
    outside = [
        sorted(name.removeprefix("transformer.") for name in names if ".layers." not in name) for names in written
    ]
    assert outside == [["position_embedding", "word_embedding.weight"], [], ["final_norm.bias", "final_norm.weight"]]


def test_stages_are_refused_where_there_are_none(tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"^`parallel.pp_size` must be at most `model.num_layers` \(2\), but is 3$"):
        tiny_run("gpt", tmp_path, parallel__pp_size=3, parallel__tp_size="auto")
    with pytest.raises(ValueError, match="^`parallel.pp_size` must be 1 outside src/train.py, .* but is 2$"):
        ZeroShotConfig(str(tmp_path), LambadaConfig("lambada", "x"), "y", parallel=Layout(pp_size=2))
    monkeypatch.setattr(PretrainModule, "parallel", ParallelContext(pp_size=2))
    with pytest.raises(ValueError, match="^`pp_size` must be 1 for Trainer.predict, but is 2$"):
        PretrainModule(TransformerConfig("gpt", 2, 24, 4, 99, 13)).predict_step({}, 0)
    without = dataclasses.replace(family_of("gpt"), transformer_inputs=None)
    monkeypatch.setattr(ModelConfig, "traits", without)
    with pytest.raises(ValueError, match="1 for the family gpt, which does not set `transformer_inputs`, but is 2"):
        tiny_run("gpt", tmp_path, parallel__pp_size=2)


def _forget_the_weight(rank: int) -> None:
    optimizer.copy_from_owner = lambda weight, context: None


def test_a_copied_word_embedding_that_differs_ends_the_run(folder) -> None:
    run = tiny_run("gpt", folder / "drift", trainer__check_replicas_every_steps=1, parallel__pp_size=2)
    run_jobs([run], 2, expected=REPLICAS_DIFFER, fault=_forget_the_weight)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_half_types_agree_over_the_stages(folder, precision) -> None:
    """The word embeddings of both stages have the same bits, and all stages skip a step that overflows."""
    root = folder / precision
    changes = {"precision__dtype": precision, "model__num_layers": 2, "micro_batch_size": 2, "trainer__max_steps": 20}
    changes["trainer__check_replicas_every_steps"] = 1
    if precision == "fp16":
        changes |= {"precision": {"dtype": "fp16", "initial_loss_scale": 2.0**24, "hysteresis": 1}}
        changes.pop("precision__dtype")
    run_layouts([("gpt", root, changes, [(1, 2, 1)])])
    rows = read_rows(root / ONE)
    assert (precision == "fp16") == (0 < rows[-1]["num_skipped"] < 15)  # some steps overflow, others do not
    for row, other in zip(rows, read_rows(root / "1x2x1"), strict=True):
        assert row["num_skipped"] == other["num_skipped"]
        assert row["loss_scale"] == other["loss_scale"]
        assert abs(row["train/loss"] - other["train/loss"]) < 0.01 * row["train/loss"]
