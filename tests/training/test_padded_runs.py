"""Runs with dummy heads equal those of one process (fp64, 1e-12); their checkpoints know nothing of the padding."""

import dataclasses
from pathlib import Path

import pytest
import torch
from ranks import make_context, run_ranks
from runs import DROPOUT, ONE, assert_equal_runs, read_tensors, run_jobs, run_layouts, tiny_run
from sharding import equal_tensors

from lmscale.checkpoint import Checkpoint, list_checkpoints
from lmscale.config import Layout
from lmscale.hugging_face.conversion import export_hugging_face, import_hugging_face
from lmscale.parallel import ParallelContext
from lmscale.runtime.ranks import Ranks
from lmscale.trained_model import load_model
from lmscale.training.announcement import describe_options

BOUND = 1e-12
FOUR_HEADS = {"model__hidden_size": 96, "model__vocab_multiple": 96}  # 2, 2 and 0 of them on three ranks
THREE_HEADS = {"model__num_attention_heads": 3}  # 2 and 1 on two ranks
PADS = {"parallel__pad_heads": True}
CASES = {  # the family, what it changes, tp_size, pp_size and dp_size
    "gpt": ("gpt", FOUR_HEADS | DROPOUT | {"optimizer__weight_decay": 0.1, "micro_batch_size": 2}, (3, 1, 1)),
    "bert sequence": (
        "bert",
        FOUR_HEADS | DROPOUT | {"parallel__sequence_parallel": True, "model__recompute": "full"},
        (3, 1, 1),
    ),
    "gpt zero1": ("gpt", THREE_HEADS | {"parallel__zero1": True, "model__recompute": "selective"}, (2, 1, 2)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Every case on one process and on its ranks."""
    root = tmp_path_factory.mktemp("padded")
    run_layouts((family, root / name, PADS | changes, [layout]) for name, (family, changes, layout) in CASES.items())
    return root


@pytest.mark.parametrize("case", CASES)
def test_losses_norms_weights_and_moments_equal_those_of_one_process(root: Path, case: str) -> None:
    assert_equal_runs(root / case / ONE, root / case / "{}x{}x{}".format(*CASES[case][2]), BOUND)


def test_a_checkpoint_has_no_dummy_heads(root: Path) -> None:
    path = list_checkpoints(root / "gpt" / "3x1x1" / "checkpoints")[-1]
    metadata, plain = (
        Checkpoint.open(list_checkpoints(root / "gpt" / name / "checkpoints")[-1]).metadata for name in ("3x1x1", ONE)
    )
    assert Checkpoint(path, metadata).damage() is None and metadata.layout == Layout(tp_size=3).sizes
    assert metadata.model == plain.model
    shapes = [{key: (e.shape, e.shard_dim) for key, e in each.tensors.items()} for each in (metadata, plain)]
    assert shapes[0] == shapes[1]
    attention = "transformer.layers.1.attention."
    cuts = {
        name: [(piece.start, piece.stop) for piece in metadata.tensors[f"exp_avg/{attention}{name}"].pieces]
        for name in ("qkv.weight", "qkv.bias", "output.weight")
    }
    heads = [(0, 144), (144, 288)]  # 2 heads of Q, K and V with 24 each; the third rank writes nothing
    assert cuts == {"qkv.weight": heads, "qkv.bias": heads, "output.weight": [(0, 48), (48, 96)]}
    uneven = Checkpoint.open(list_checkpoints(root / "gpt zero1" / "2x1x2" / "checkpoints")[-1]).metadata
    pieces = uneven.tensors[f"model/{attention}qkv.weight"].pieces
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 48), (48, 72)]  # 2 heads of 8 and 1


def _logits(rank: int, path: Path, tp_size: int) -> torch.Tensor:
    context = dataclasses.replace(make_context(tp_size), pad_heads=True) if tp_size > 1 else ParallelContext()
    model = load_model(path, context, torch.float64, ranks=Ranks(rank, tp_size)).model
    return model(torch.arange(20).view(2, 10))


def test_the_model_goes_to_hugging_face_and_back_bit_for_bit(tmp_path: Path) -> None:
    run = tiny_run("gpt", tmp_path / "run", parallel__tp_size=3, precision__dtype="fp32", **PADS, **FOUR_HEADS)
    run_jobs([run], 3)
    path = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    back = import_hugging_face(export_hugging_face(path, tmp_path / "theirs"), tmp_path / "back", 1, 96)
    ours = read_tensors(tmp_path / "run")
    with Checkpoint.open(back).reader() as reader:
        again = {key: reader.read(key) for key in reader.checkpoint.metadata.tensors}
    assert equal_tensors(again, {key: tensor for key, tensor in ours.items() if key.startswith("model/")})
    whole, found = (torch.cat(run_ranks(_logits, tp_size, back, tp_size), -1) for tp_size in (1, 3))
    real = whole.isfinite()  # not those of padding rows of the vocabulary
    assert (found - whole)[real].abs().max() < BOUND * whole[real].abs().max()


@pytest.mark.parametrize(("tp_size", "line"), [(3, "6 computed for 4"), (2, "without effect: tp_size divides them")])
def test_the_first_lines_say_what_is_padded(tmp_path: Path, tp_size: int, line: str) -> None:
    run = tiny_run("gpt", tmp_path, **PADS, **FOUR_HEADS)
    layout = Layout(tp_size=tp_size, pad_heads=True)
    assert describe_options(run, run.model.resolve(100), layout) == f"options: padded heads ({line})\n"
