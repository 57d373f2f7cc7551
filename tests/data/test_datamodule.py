"""Steps and validation sequences of each data rank, and the digest of their samples, the same at every layout."""

import dataclasses
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
import warm
from corpora import epochs_of, local_config, prepare_texts
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lmscale.config import TransformerConfig
from lmscale.config.data import DataConfig
from lmscale.data import datamodule
from lmscale.data.data_digest import digest_number, digest_of_samples, digest_text, expected_digest
from lmscale.data.datamodule import PretrainDataModule, TextDataModule
from lmscale.data.loading import cut_step
from lmscale.data.sampler import GlobalBatchSampler, RunSamples
from lmscale.parallel import ParallelContext
from lmscale.training.module import GPTModule

TEXTS = [f"Number {i} is here. It has {i * 7} words or so. The end of {i}." for i in range(120)]
NUM_STEPS = 9


@pytest.fixture(scope="module", params=["gpt", "bert"])
def prepared(request, tmp_path_factory):
    return prepare_texts(tmp_path_factory.mktemp("corpus"), TEXTS, request.param, validation_every=6)


def make(prepared, dp_rank=0, dp_size=1, micro=2, batch=12, num_validation=None, **changes) -> PretrainDataModule:
    config = DataConfig("embedded", **({"seq_length": 19} | changes))
    samples = RunSamples(prepared, config, 7, batch, NUM_STEPS, num_validation)
    module = PretrainDataModule(samples, micro, config.num_workers, by_length=False)
    parallel = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size)
    strategy = SimpleNamespace(parallel=parallel, root_device=torch.device("cpu"))
    module.trainer = SimpleNamespace(strategy=strategy, global_step=0)
    return module


def equal(a: list[dict], b: list[dict]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in zip(a, b, strict=True)
    )


def test_a_step_is_one_batch_with_run_wide_sample_numbers(prepared) -> None:
    loader = make(prepared, dp_rank=1, dp_size=2, micro=3).train_dataloader()
    steps = list(loader)
    assert len(loader) == len(steps) == NUM_STEPS
    for number, step in enumerate(steps):
        assert step["sample_numbers"].tolist() == list(range(12 * number + 6, 12 * number + 12))
    expected = dict.fromkeys(("tokens", "labels", "sample_numbers", "sample_indices"), torch.int64)
    if prepared.manifest["architecture"] == "bert":
        expected |= {"token_types": torch.int64, "attention_mask": torch.bool, "sop_labels": torch.int64}
    assert {key: value.dtype for key, value in step.items()} == expected
    assert step["tokens"].shape == (6, 19) and step["sample_numbers"].shape == (6,)


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 4), (2, 3), (3, 1), (4, 3)])
def test_the_global_batch_is_the_same_at_every_layout(prepared, dp_size, micro) -> None:
    whole = list(make(prepared).train_dataloader())
    shares = [list(make(prepared, r, dp_size, micro).train_dataloader()) for r in range(dp_size)]
    together = [{key: torch.cat([share[i][key] for share in shares]) for key in whole[0]} for i in range(NUM_STEPS)]
    assert equal(together, whole)


def test_each_epoch_of_a_loader_begins_after_the_completed_steps_and_it_keeps_its_length(prepared) -> None:
    module = make(prepared)
    loader = module.train_dataloader()
    whole = list(loader)
    module.trainer.global_step = 4
    assert len(loader) == NUM_STEPS  # Lightning accounts for restored steps itself
    assert equal(list(loader), whole[4:])


def test_the_corpus_hash_depends_on_texts_and_tokenizer(prepared) -> None:
    changes = {"train": prepared.manifest["train"] | {"sha256": "others"}}, {"tokenizer": "another"}
    others = [dataclasses.replace(prepared, manifest=prepared.manifest | change) for change in changes]
    assert len({corpus.content_hash for corpus in (prepared, *others)}) == 3


def test_loaders_do_not_use_the_global_generators(prepared) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    module = make(prepared)
    for _ in (*module.train_dataloader(), *module.val_dataloader()):
        pass
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_worker_processes_give_the_same_steps(prepared) -> None:
    alone, helped = make(prepared), make(prepared, num_workers=2)
    assert equal(list(helped.train_dataloader()), list(alone.train_dataloader()))
    assert equal(list(helped.val_dataloader()), list(alone.val_dataloader()))


def _end_amid_an_epoch(prepared) -> None:
    global steps  # as the traceback of an error keeps them
    steps = iter(make(prepared, num_workers=1).train_dataloader())
    next(steps)


def test_a_rank_ends_while_its_loader_processes_ignore_sigterm(prepared) -> None:
    """At exit Python sends it to them and waits: a run with an error in its samples hung."""
    rank = warm.context.Process(target=_end_amid_an_epoch, args=(prepared,))
    rank.start()
    rank.join(120)
    rank.kill()
    rank.join()
    assert rank.exitcode == 0


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
    available = len(make(prepared).samples.scored)
    assert len(make(prepared, num_validation=available).samples.scored) == available
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
    for before, after in zip(plain.train_dataloader(), sorted_.train_dataloader(), strict=True):
        order = after["sample_numbers"] - after["sample_numbers"].min()
        assert all(torch.equal(before[key][order], after[key]) for key in before)
        if prepared.manifest["architecture"] == "gpt":
            assert order.tolist() == list(range(12))
            continue
        lengths = after["attention_mask"].sum(dim=1)
        expected = sorted(range(12), key=lambda row: -before["attention_mask"][row].sum())
        assert order.tolist() == expected and (lengths.diff() <= 0).all()
        padded += int((lengths < 19).sum())
    assert prepared.manifest["architecture"] == "gpt" or 0 < padded < 12 * NUM_STEPS


@pytest.mark.parametrize("size", [1, 3, 5, 12, None])
def test_the_micro_batches_of_a_step_have_its_samples_in_their_order(prepared, size) -> None:
    step = next(iter(make(prepared).train_dataloader()))
    found = cut_step(step, size)
    assert [len(micro["tokens"]) for micro in found[:-1]] == [size] * (len(found) - 1)
    for key in step.keys() - {"attention_mask"}:
        assert torch.equal(torch.cat([micro[key] for micro in found]), step[key])


def test_a_micro_batch_without_padding_has_no_mask(prepared) -> None:
    module = make(prepared, micro=3)
    module.by_length = True
    kinds = set()
    for step in module.train_dataloader():
        micro_batches = cut_step(step, 3)
        if prepared.manifest["architecture"] == "gpt":
            assert all("attention_mask" not in micro for micro in micro_batches)
            continue
        for micro, mask in zip(micro_batches, step["attention_mask"].split(3), strict=True):
            kinds.add(bool(mask.all()))
            if mask.all():
                assert micro["attention_mask"] is None
            else:
                assert torch.equal(micro["attention_mask"], mask)
            assert micro["scored"].tolist() == (micro["labels"].flatten() != -100).nonzero()[:, 0].tolist()
    assert kinds == (set() if prepared.manifest["architecture"] == "gpt" else {True, False})


def test_every_tensor_of_a_pinned_step_is_copied_without_waiting(prepared, monkeypatch) -> None:
    pinned, copied = [], []  # a build without CUDA pins nothing, so a list stands in for the host's pinned memory

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.untyped_storage().data_ptr())
        return tensor

    def copy(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        copied.append((tensor.is_pinned(), non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().data_ptr() in pinned)
    monkeypatch.setattr(Tensor, "to", copy)
    data = make(prepared)
    data.by_length = True
    step = {key: pin(value) for key, value in next(iter(data.train_dataloader())).items()}
    module = GPTModule(TransformerConfig("gpt", 2, 32, 4, 64, 64), micro_batch_size=3)
    module._trainer = SimpleNamespace(
        training=True, predicting=False, strategy=SimpleNamespace(parallel=ParallelContext())
    )
    move_data_to_device(module.prepare_batch(step), torch.device("cuda"))
    # Each micro-batch has its dropout numbers; BERT adds `scored` and may drop a mask.
    num_tensors = {"gpt": [4 * 5], "bert": range(4 * 8, 4 * 9 + 1)}[prepared.manifest["architecture"]]
    assert len(copied) in num_tensors
    assert set(copied) == {(True, True)}


def test_a_step_in_pageable_memory_is_not_pinned(prepared) -> None:
    for micro in cut_step(next(iter(make(prepared).train_dataloader())), 3):
        assert not any(value.is_pinned() for value in micro.values() if value is not None)


def test_a_users_trainer_is_told_what_was_skipped(tmp_path, monkeypatch) -> None:
    (tmp_path / "text").mkdir()
    for name in ("a.txt", ".b.txt"):
        (tmp_path / "text" / name).write_text("one text\n\ntwo texts\n\nthree texts")
    said = []
    monkeypatch.setattr(datamodule, "rank_zero_info", said.append)
    TextDataModule("gpt", data=local_config(tmp_path / "text", tmp_path), vocab_size=260)
    assert "note: data.path: skipped: hidden 1 (the first is .b.txt)" in said


def consumed(sampler: GlobalBatchSampler) -> torch.Tensor:
    """The digest as training computes it, step by step."""
    total = torch.zeros((), dtype=torch.int64)
    for step in sampler:
        numbers, _, indices = (torch.tensor(column) for column in zip(*step, strict=True))
        total += digest_of_samples(numbers, indices)
    return total


def test_ranks_sum_to_the_expected_digest_at_any_layout_and_over_epochs() -> None:
    steps = 23  # 276 samples, 100 per epoch
    expected = expected_digest(epochs_of(100, 12, 0, 1, 7, steps), steps)
    for dp_size in (1, 2, 3):
        ranks = [epochs_of(100, 12, rank, dp_size, 7, steps) for rank in range(dp_size)]
        assert sum(consumed(rank) for rank in ranks) == expected
    for num_shares in (2, 5):
        sampler = epochs_of(100, 12, 0, 1, 7, steps)
        assert sum(expected_digest(sampler, steps, share, num_shares) for share in range(num_shares)) == expected


def test_another_seed_corpus_length_or_number_of_steps_gives_another_digest() -> None:
    digests = {
        digest_text(int(expected_digest(epochs_of(size, 12, 0, 1, seed, 9), steps)))
        for size in (100, 101)
        for seed in (1, 2)
        for steps in (8, 9)
    }
    assert len(digests) == 8


def test_swapped_samples_change_the_digest() -> None:
    numbers = torch.arange(1000)
    indices = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    digest = digest_of_samples(numbers, indices)
    seen = set()
    for place in range(999):
        swapped = indices.clone()
        swapped[[place, place + 1]] = indices[[place + 1, place]]
        seen.add(int(digest_of_samples(numbers, swapped)))
    assert int(digest) not in seen and len(seen) == 999


def test_a_digest_round_trips_through_text() -> None:
    for number in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        assert digest_number(digest_text(number)) == number
