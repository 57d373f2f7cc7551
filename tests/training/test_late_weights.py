"""ZeRO-1's weights arrive behind the next forward pass: nothing reads one too early, whatever happens in between.

In most runs here the gather of a piece is `Late`: it takes place only when it is waited for, and until then the parts
of the other data ranks are nan, so that whatever reads them too early shows.
"""

import json
import os
import signal
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import warm
from file_operations import CRASHED
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from ranks import fake_world, free_ports, run_in_turn, run_ranks, torchrun_rank
from runs import assert_same_run, at, tiny_run
from sharding import equal_tensors, random_batch, small_config, total_loss
from stock import parts
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lmscale import partition
from lmscale.checkpoint import Checkpoint, list_checkpoints
from lmscale.config.pretrain import RunConfig
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.runtime.exit_codes import DIVERGED, DONE, FAILED, INTERRUPTED
from lmscale.training.module import GPTModule, PretrainModule
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve
from lmscale.training.run import Run
from lmscale.training.step import gradient_buffer
from lmscale.training.step.gradient_buffer import GradientBuffer
from lmscale.training.step.optimizer import MixedPrecisionAdamW
from lmscale.training.step.stock_trainer import reads_no_weights
from lmscale.training.strategy import TensorParallelStrategy

PIECE = 1000  # elements; the small models have 20,000 and more
IN_FORWARD = "MixedPrecisionAdamW.gather_behind.<locals>.<lambda>"
begin = gradient_buffer.begin_gather_from_data_ranks


class Late:
    """The gather of a piece that waits as long as it may, and counts who waited for it."""

    waited: Counter[str] = Counter()

    def __init__(self, piece: Tensor, context: ParallelContext) -> None:
        self.piece, self.context = piece, context
        cuts = piece.view(context.dp_size, -1)
        cuts[torch.arange(context.dp_size) != context.dp_rank] = torch.nan

    def wait(self) -> None:
        begin(self.piece, self.context).wait()
        self.waited[sys._getframe(2).f_code.co_qualname] += 1


def how(kind: str) -> ExitStack:
    """Let weights arrive `late` or `at once`, as without overlap; else as they do."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(partition, "PIECE_ELEMENTS", PIECE))
    if kind == "late":
        stack.enter_context(mock.patch.object(gradient_buffer, "begin_gather_from_data_ranks", Late))
    elif kind == "at once":
        stack.enter_context(mock.patch.object(MixedPrecisionAdamW, "gather_behind", lambda *_: None))
    return stack


def _train(rank: int, jobs: list[tuple[str, Run, int]]) -> Counter[str]:
    """Train jobs in turn; returns who waited for late weights. One may be signalled right after its second update, or
    have gradients that are not finite."""
    gather = GradientBuffer.begin_gather

    def gather_and_signal(self: GradientBuffer) -> None:
        gather(self)
        self.count = getattr(self, "count", 0) + 1
        if self.count == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    faults = {
        "signal": (GradientBuffer, "begin_gather", gather_and_signal),
        "diverging": (PretrainModule, "total_loss", lambda self, terms: terms.sum() * torch.inf),
    }

    def run(job: tuple[str, Run, int]) -> None:
        kind, resolved, expected = job
        with how("late" if kind in faults else kind) as stack:
            if kind in faults:
                stack.enter_context(mock.patch.object(*faults[kind]))
            assert pretrain(resolved) == expected, kind

    run_in_turn(rank, run, jobs)
    return Late.waited


def train(jobs: list[tuple[str, RunConfig, int]], world_size: int) -> Counter[str]:
    """Train jobs (how, run, exit code) in turn on the same ranks; returns who waited for late weights on rank 0."""
    return run_ranks(_train, world_size, [(kind, resolve(run), code) for kind, run, code in jobs])[0]


def assert_same_checkpoints(one: Path, other: Path) -> None:
    """Compare the runs and the tensors of all their checkpoints bitwise."""
    assert_same_run(one, other)
    paths, others = (list_checkpoints(each / "checkpoints") for each in (one, other))
    assert [path.name for path in paths] == [path.name for path in others] != []
    for path, twin in zip(paths, others, strict=True):
        found = []
        for each in (path, twin):
            with Checkpoint.open(each).reader() as reader:
                found.append({key: reader.read(key) for key in reader.checkpoint.metadata.tensors})
        assert equal_tensors(*found), path.name


READERS = {"trainer__max_steps": 5, "trainer__validate_every_steps": 3, "trainer__check_replicas_every_steps": 2}
READERS |= {"checkpoint__save_every_steps": 1, "checkpoint__keep_last": None, "checkpoint__async": True}
READERS |= {"logger__layer_statistics": [2, 3], "logger__layer_grad_norms": True, "trainer__progress_bar": True}
READERS |= {"parallel__zero1": True, "micro_batch_size": 1, "model__hidden_dropout": 0.1, "resume__path": "auto"}


def test_a_run_with_every_reader_of_weights_is_bitwise_that_without_overlap(tmp_path) -> None:
    """Replica checks, statistics, validations, saves, a resume, SIGTERM right after an update, and a divergence."""
    settings = READERS | {"parallel__dp_size": 2, "precision__dtype": "bf16", "model__recompute": "full"}

    def run(name: str, **changes: Any) -> RunConfig:
        return tiny_run("gpt", tmp_path / name, **settings | changes)

    waited = train(
        [
            ("at once", run("at once"), DONE),
            ("as it is", run("as it is"), DONE),
            ("late", run("late", trainer__stop_after_steps=3), DONE),
            ("late", run("late"), DONE),
            ("signal", run("signal"), INTERRUPTED),
            ("late", run("signal"), DONE),
            ("diverging", run("diverged", trainer__max_skipped_steps=0), DIVERGED),
        ],
        2,
    )
    for name in ("as it is", "late", "signal"):
        assert_same_run(tmp_path / "at once", tmp_path / name)
    assert_same_checkpoints(tmp_path / "at once", tmp_path / "late")
    statistics = [(tmp_path / name / "layer_statistics.jsonl").read_text() for name in ("at once", "late")]
    assert statistics[0] == statistics[1]
    (report,) = (tmp_path / "diverged").glob("not_finite_step_*.json")
    assert [each["weights"] for each in json.loads(report.read_text())] == [[], []]
    places = {IN_FORWARD, "ReplicaSentinel._check", "TensorParallelStrategy.teardown", "diagnose"}
    assert places <= waited.keys(), waited
    assert waited[IN_FORWARD] > 100  # most arrive behind a forward pass


CASES = {  # family, (tensor, pipeline, data), changes
    "gpt-fp32": ("gpt", (1, 1, 2), {"precision__dtype": "fp32"}),
    "bert-fp16": ("bert", (1, 1, 2), {"precision__dtype": "fp16", "precision__initial_loss_scale": 2.0**14}),
    "bert-half moments": ("bert", (1, 1, 2), {"precision__dtype": "bf16", "optimizer__moments": "bf16"}),
    "gpt-fp64, three": ("gpt", (1, 1, 3), {"global_batch_size": 9}),
    "bert-fp64, four": ("bert", (1, 1, 4), {"model__norm_order": "post"}),
    "gpt-fp8": (
        "gpt",
        (1, 1, 2),
        {
            "precision__dtype": "fp8",
            "model__hidden_size": 32,
            "model__num_attention_heads": 2,
            "data__seq_length": 32,
            "micro_batch_size": 2,
        },
    ),
    "gpt-compiled": ("gpt", (1, 1, 2), {"precision__dtype": "fp32", "compile": True}),
    "gpt-tensor, sequence": (
        "gpt",
        (2, 1, 2),
        {"parallel__sequence_parallel": True, "data__seq_length": 32, "precision__dtype": "bf16"},
    ),
    "bert-stages": ("bert", (1, 2, 2), {"precision__dtype": "bf16"}),
    "gpt-stages": ("gpt", (1, 2, 2), {"model__num_layers": 3, "loss_reduction": "mean_of_means"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_precision_and_layout_gives_the_bits_of_a_run_without_overlap(tmp_path, case) -> None:
    family, layout, changes = CASES[case]
    settings = READERS | {"trainer__max_steps": 4} | at(layout) | changes
    tensor, stages, data = layout
    runs = [(kind, tiny_run(family, tmp_path / kind, **settings), DONE) for kind in ("at once", "late", "as it is")]
    assert train(runs, tensor * stages * data)[IN_FORWARD] > 10
    for kind in ("late", "as it is"):
        assert_same_checkpoints(tmp_path / "at once", tmp_path / kind)


def test_the_first_layers_arrive_first_and_each_layer_waits_for_its_own(monkeypatch) -> None:
    """All of them before the next update, even if no forward pass was in between."""
    events: list[Any] = []
    monkeypatch.setattr(partition, "PIECE_ELEMENTS", PIECE)

    def begin_noted(piece: Tensor, context: ParallelContext) -> SimpleNamespace:
        events.append("begin")
        return SimpleNamespace(wait=lambda: events.append(piece.data_ptr()))

    monkeypatch.setattr(gradient_buffer, "begin_gather_from_data_ranks", begin_noted)
    with fake_world(0, 2):
        context = ParallelContext(dp_size=2, zero1=True, dp_group=dist.group.WORLD)
        model = build_model(small_config("bert"), context, seed=1)
        parameters, layers = model.named_parameters(), model.transformer.layers
        optimizer = MixedPrecisionAdamW(parameters, OptimizerConfig(lr=1.0), PrecisionConfig("fp32"), context)
        optimizer.gather_behind(model.transformer)
        for _ in range(2):
            optimizer.step()
        number = events.index(next(event for event in events if event != "begin"))
        assert [event == "begin" for event in events] == [True] * number + [False] * number + [True] * number
        events.clear()
        for layer in layers:
            layer.register_forward_pre_hook(lambda layer, _: events.append(layer))
        total_loss(model, random_batch(model.config, seed=1))
    pieces = [event for event in events if isinstance(event, int)]
    assert len(pieces) == number
    assert pieces == sorted(pieces, reverse=True) and len(pieces) > 10  # the model's first parameters are the last
    assert not isinstance(events[-1], nn.Module)  # the heads follow the layers
    for index, layer in enumerate(layers):
        before = [event for event in events[: events.index(layer)] if isinstance(event, int)]
        first = min(param.data_ptr() for param in layer.parameters())
        assert before[-1] <= first < before[-1] + PIECE * 4, index  # not more than this layer needs


class Reader(L.Callback):
    """Keeps the weights after every step, as a user's callback may."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.found.append(torch.cat([param.detach().flatten() for param in pl_module.parameters()]))


class ReadingModule(GPTModule):
    """Reads the weights before its forward pass."""

    def loss_sums(self, batch: dict, sample_keys: Tensor | None) -> Tensor:
        penalty = sum(param.square().sum() for param in self.model.parameters())
        return super().loss_sums(batch, sample_keys) + 1e-3 * penalty


class Failing(torch.utils.data.Dataset):
    """Cannot be read after two steps of four samples."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= 8:
            raise ValueError("the third batch cannot be read")
        row = (torch.arange(34) + index) * 7 % 500
        return {"tokens": row[:-1], "labels": row[1:]}


def _fit(rank: int, folder: Path) -> dict[str, tuple[bool, list[Tensor]]]:
    """Fit a module with a stock Trainer; by case, whether weights arrive in the forward pass, and those read."""

    def fit(job: tuple[str, str]) -> tuple[bool, list[Tensor]]:
        case, kind = job
        plain, data = parts()
        module = (ReadingModule if case == "module" else GPTModule)(plain.config, micro_batch_size=2)
        reader, own = Reader(), [TQDMProgressBar(), ModelCheckpoint(folder / case / kind, every_n_train_steps=1)]
        trainer = L.Trainer(
            strategy=TensorParallelStrategy(zero1=True),
            devices=2,
            accelerator="cpu",
            max_steps=4,
            precision="bf16-true",
            logger=CSVLogger(folder, name="", version=f"{case} {kind}"),
            callbacks=[*own, *([reader] if case == "callback" else [])],
            enable_model_summary=False,
            val_check_interval=3,
            check_val_every_n_epoch=None,
            use_distributed_sampler=False,
        )
        with how(kind):
            if case == "failing":
                with pytest.raises(ValueError, match="the third batch"):
                    trainer.fit(module, DataLoader(Failing(), batch_size=4))
                assert trainer.global_step == 2
            else:
                trainer.fit(module, data)
        weights = [param.detach().clone() for param in module.parameters()]
        return "before_layer" in vars(module.model.transformer), reader.found + weights

    jobs = [(case, kind) for case in ("own", "callback", "module", "failing") for kind in ("at once", "late")]
    return dict(zip(jobs, run_in_turn(rank, fit, jobs), strict=True))


def test_users_code_under_a_stock_trainer_reads_complete_weights(tmp_path) -> None:
    """In a callback, in a module of its own, after the fit, and after an exception right after an update."""
    for found in run_ranks(_fit, 2, tmp_path):
        for case in ("own", "callback", "module", "failing"):
            (_, expected), (overlaps, weights) = (found[case, kind] for kind in ("at once", "late"))
            assert overlaps == (case in ("own", "failing")), case
            assert len(weights) == len(expected) > 20 and all(map(torch.equal, weights, expected)), case


class OfTheUser:
    """Stands for any object of a class that is not the project's."""


def test_each_update_waits_where_the_trainer_has_code_of_the_users() -> None:
    module = GPTModule(small_config("gpt"), micro_batch_size=2)
    parts = {"lightning_module": module, "datamodule": None, "strategy": None, "profiler": None}
    parts |= {"callbacks": [], "loggers": []}
    assert reads_no_weights(SimpleNamespace(**parts))
    for place in ("datamodule", "strategy", "profiler", "callbacks", "loggers"):
        own = [OfTheUser()] if place.endswith("s") else OfTheUser()
        assert not reads_no_weights(SimpleNamespace(**parts | {place: own})), place
    hook = module.register_forward_pre_hook(lambda *_: None)
    assert not reads_no_weights(SimpleNamespace(**parts))
    hook.remove()
    assert reads_no_weights(SimpleNamespace(**parts))
    module.on_train_batch_end = lambda *_: None
    assert not reads_no_weights(SimpleNamespace(**parts))


def test_after_an_exception_the_end_of_a_fit_does_not_wait_for_a_lost_rank(monkeypatch) -> None:
    """Lightning restores its handlers and its state after `teardown`."""
    strategy, ended = TensorParallelStrategy(zero1=True), []
    optimizer = MixedPrecisionAdamW.__new__(MixedPrecisionAdamW)
    optimizer.buffer = mock.Mock(**{"wait_for_weights.side_effect": RuntimeError("connection closed by peer")})
    strategy._optimizers = [optimizer]
    strategy.cluster_environment = SimpleNamespace(teardown=lambda: ended.append("environment"))
    strategy._accelerator = SimpleNamespace(teardown=lambda: ended.append("accelerator"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="closed by peer"):
        strategy.teardown()
    monkeypatch.setattr(TensorParallelStrategy, "world_size", 1)
    strategy.on_exception(ValueError("the third batch cannot be read"))
    strategy.teardown()
    assert ended == ["environment", "accelerator"]


DYING = {"parallel__dp_size": 2, "parallel__zero1": True, "precision__dtype": "fp32", "resume__path": "auto"}
DYING |= {"trainer__max_steps": 3, "checkpoint__save_every_steps": 1, "model__hidden_size": 64}


def _on_rank(rank: int, run: Run, port: int, begins: int) -> None:
    """Train on a rank; rank 1 dies right after it has begun so many gathers of the second step, or in the next step."""
    os.environ |= torchrun_rank(rank, 2) | {"MASTER_PORT": str(port)}
    gather, count = GradientBuffer.begin_gather, 0

    def gather_and_die(self: GradientBuffer) -> None:
        nonlocal count
        count += 1
        if count == 2:
            pieces = self.weights.view(self._grid).unbind()[::-1][:begins]
            works = [begin(piece.view(-1), self.context) for piece in pieces]  # noqa: F841
            os._exit(CRASHED)
        gather(self)

    with how("as it is"):
        if rank == 1:
            GradientBuffer.begin_gather = gather_and_die
        sys.exit(pretrain(run))


@pytest.mark.parametrize("begins", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 10))])
def test_a_rank_that_dies_while_weights_arrive_ends_the_others_in_one_line(tmp_path, capfd, begins) -> None:
    run = tiny_run("gpt", tmp_path / "run", **DYING)
    arguments = resolve(run), free_ports()[0], begins
    ranks = [warm.context.Process(target=_on_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60.0)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    assert codes == [FAILED, CRASHED]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and "a rank that it communicates with is gone" in lines[0], lines
    train([("as it is", each, DONE) for each in (run, tiny_run("gpt", tmp_path / "whole", **DYING))], 2)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
