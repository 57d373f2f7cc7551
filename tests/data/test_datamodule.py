"""Steps and validation sequences of each data rank."""

from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from corpora import local_config, prepare_texts
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lmscale.config import BatchConfig
from lmscale.config.data import DataConfig
from lmscale.data import datamodule
from lmscale.data.datamodule import PretrainDataModule, TextDataModule
from lmscale.data.loading import MicroBatches

TEXTS = [f"Number {i} is here. It has {i * 7} words or so. The end of {i}." for i in range(120)]
NUM_STEPS = 9


@pytest.fixture(scope="module", params=["gpt", "bert"])
def prepared(request, tmp_path_factory):
    return prepare_texts(tmp_path_factory.mktemp("corpus"), TEXTS, request.param, validation_every=6)


def make(prepared, dp_rank=0, dp_size=1, micro=2, batch=12, num_validation=None, **changes) -> PretrainDataModule:
    config = DataConfig("embedded", **({"seq_length": 19} | changes))
    sizes = BatchConfig(micro, batch, dp_size)
    module = PretrainDataModule(prepared, config, sizes, 7, NUM_STEPS, num_validation)
    parallel = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size)
    module.trainer = SimpleNamespace(strategy=SimpleNamespace(parallel=parallel, root_device=torch.device("cpu")))
    return module


def joined(steps: list[list[dict]]) -> list[dict[str, torch.Tensor]]:
    """Each step's micro-batches as one batch."""
    return [{key: torch.cat([micro[key] for micro in step]) for key in step[0]} for step in steps]


def equal(a: list[dict], b: list[dict]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in zip(a, b, strict=True)
    )


def test_a_step_is_a_list_of_micro_batches_with_run_wide_sample_numbers(prepared) -> None:
    loader = make(prepared, dp_rank=1, dp_size=2, micro=3).step_loader()
    steps = list(loader)
    assert len(loader) == len(steps) == NUM_STEPS
    for number, step in enumerate(steps):
        assert [len(micro["tokens"]) for micro in step] == [3, 3]
        numbers = torch.cat([micro["sample_numbers"] for micro in step])
        assert numbers.tolist() == list(range(12 * number + 6, 12 * number + 12))
    expected = dict.fromkeys(("tokens", "labels", "sample_numbers", "sample_indices"), torch.int64)
    if prepared.architecture == "bert":
        expected |= {"token_types": torch.int64, "attention_mask": torch.bool, "sop_labels": torch.int64}
    assert {key: value.dtype for key, value in step[0].items()} == expected
    assert step[0]["tokens"].shape == (3, 19) and step[0]["sample_numbers"].shape == (3,)


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 4), (2, 3), (3, 1), (4, 3)])
def test_the_global_batch_is_the_same_at_every_layout(prepared, dp_size, micro) -> None:
    whole = joined(list(make(prepared).step_loader()))
    shares = [joined(list(make(prepared, r, dp_size, micro).step_loader())) for r in range(dp_size)]
    together = [{key: torch.cat([share[i][key] for share in shares]) for key in whole[0]} for i in range(NUM_STEPS)]
    assert equal(together, whole)


def test_a_resumed_loader_continues_where_the_run_stopped_and_keeps_its_length(prepared) -> None:
    whole = joined(list(make(prepared).step_loader()))
    stopped = make(prepared)
    stopped.completed_steps = 4
    resumed = make(prepared, micro=6)
    resumed.load_state_dict(stopped.state_dict())
    loader = resumed.step_loader()
    assert len(loader) == NUM_STEPS  # Lightning accounts for restored steps itself
    assert equal(joined(list(loader)), whole[4:])
    with pytest.raises(ValueError, match="`global_batch_size` must divide the 48 sequences .*, but is 10"):
        make(prepared, batch=10).load_state_dict(stopped.state_dict())


def test_loaders_do_not_use_the_global_generators(prepared) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    module = make(prepared)
    for _ in (*module.step_loader(), *module.val_dataloader()):
        pass
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_worker_processes_give_the_same_steps(prepared) -> None:
    alone, helped = make(prepared), make(prepared, num_workers=2)
    assert equal(joined(list(helped.step_loader())), joined(list(alone.step_loader())))
    assert equal(list(helped.val_dataloader()), list(alone.val_dataloader()))


@pytest.mark.parametrize("dp_size", [1, 2, 3, 16])
def test_every_validation_sequence_is_on_one_data_rank_once(prepared, dp_size) -> None:
    seen = []
    for rank in range(dp_size):
        module = make(prepared, rank, dp_size, micro=2, batch=96, num_validation=11)
        for batch in module.val_dataloader():
            assert 1 <= len(batch["tokens"]) <= 2
            seen += batch["sample_numbers"].tolist()
    assert seen == list(range(11))


def test_more_validation_sequences_than_available_raise(prepared) -> None:
    available = make(prepared).num_validation_samples
    assert make(prepared, num_validation=available).num_validation_samples == available
    with pytest.raises(ValueError, match=f"must be at most the validation part's {available} sequences"):
        make(prepared, num_validation=available + 1)


class _Counting(L.LightningModule):
    """Counts Lightning's calls during validation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches, self.has_ended = 0, False

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.num_batches += 1

    def on_validation_epoch_end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize(("dp_rank", "num_batches"), [(0, 0), (1, 1)])
def test_a_rank_with_nothing_to_validate_still_reaches_the_closing_reduction(prepared, dp_rank, num_batches) -> None:
    data, module = make(prepared, dp_rank, 2, num_validation=1), _Counting()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.strategy.parallel = SimpleNamespace(dp_rank=dp_rank, dp_size=2)
    trainer.validate(module, data, verbose=False)
    assert module.num_batches == num_batches and module.has_ended


def test_the_longest_come_first_if_requested(prepared) -> None:
    """The same samples in every step; a BERT's that are not padded together, those of one length in their order."""
    plain, sorted_ = make(prepared, micro=3), make(prepared, micro=3)
    sorted_.by_length = True
    padded = 0
    for before, after in zip(plain.step_loader(), sorted_.step_loader(), strict=True):
        (before,), (after,) = joined([before]), joined([after])
        order = after["sample_numbers"] - after["sample_numbers"].min()
        assert all(torch.equal(before[key][order], after[key]) for key in before)
        if prepared.architecture == "gpt":
            assert order.tolist() == list(range(12))
            continue
        lengths = after["attention_mask"].sum(dim=1)
        expected = sorted(range(12), key=lambda row: -before["attention_mask"][row].sum())
        assert order.tolist() == expected and (lengths.diff() <= 0).all()
        padded += int((lengths < 19).sum())
    assert prepared.architecture == "gpt" or 0 < padded < 12 * NUM_STEPS


def test_a_micro_batch_without_padding_has_no_mask(prepared) -> None:
    module = make(prepared, micro=3)
    module.by_length = True
    kinds = set()
    for step in module.step_loader():
        masks = [micro.get("attention_mask") for micro in step]
        for micro, mask in zip([module.on_before_batch_transfer(m, 0) for m in step], masks, strict=True):
            if prepared.architecture == "gpt":
                assert "attention_mask" not in micro
                continue
            kinds.add(bool(mask.all()))
            if mask.all():
                assert micro["attention_mask"] is None
            else:
                assert micro["attention_mask"] is mask
    assert kinds == (set() if prepared.architecture == "gpt" else {True, False})


def test_every_tensor_of_a_pinned_micro_batch_is_copied_without_waiting(prepared, monkeypatch) -> None:
    pinned, copied = [], []  # a build without CUDA pins nothing, so a list stands in for the host's pinned memory

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def copy(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        copied.append((tensor.is_pinned(), non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: any(tensor is other for other in pinned))
    monkeypatch.setattr(Tensor, "to", copy)
    module = make(prepared, micro=3)
    module.by_length = True
    step = [{key: pin(value) for key, value in micro.items()} for micro in next(iter(module.step_loader()))]
    loader = MicroBatches(lambda: [step], 4, lambda micro: torch.ones(1), lambda: None, lambda: 4)
    for micro in loader:
        move_data_to_device(module.on_before_batch_transfer(micro, 0), torch.device("cuda"))
    # BERT adds `scored` to each micro-batch and may drop its mask; the first has the counts of the step.
    num_tensors = {"gpt": [4 * 4 + 1], "bert": range(4 * 7 + 1, 4 * 8 + 1)}[prepared.architecture]
    assert len(copied) in num_tensors
    assert set(copied) == {(True, True)}


def test_a_micro_batch_in_pageable_memory_is_not_pinned(prepared) -> None:
    module = make(prepared, micro=3)
    for micro in next(iter(module.step_loader())):
        assert not any(
            value.is_pinned() for value in module.on_before_batch_transfer(micro, 0).values() if value is not None
        )


def test_a_users_trainer_is_told_what_was_skipped(tmp_path, monkeypatch) -> None:
    (tmp_path / "text").mkdir()
    for name in ("a.txt", ".b.txt"):
        (tmp_path / "text" / name).write_text("one text\n\ntwo texts\n\nthree texts")
    said = []
    monkeypatch.setattr(datamodule, "rank_zero_info", said.append)
    TextDataModule("gpt", data=local_config(tmp_path / "text", tmp_path), vocab_size=260)
    assert "note: data.path: skipped: hidden 1 (the first is .b.txt)" in said
