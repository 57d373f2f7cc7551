"""Items of steps and scoring batches: none is dropped or repeated at any layout."""

import numpy as np
import pytest
import torch
from finetuning import make_task, make_tokenizer, write_task

from lmscale.finetune.batches import ScoringBatches, TrainingSteps, collate, epoch_steps
from lmscale.finetune.features import load_features
from lmscale.finetune.preparing import prepare_features


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    made = {}
    for name in ("qqp", "race", "squad_v1"):
        place = write_task(folder, name, 23)
        made[name] = load_features(prepare_features(make_task(name), str(place), make_tokenizer(), folder / "cache"))
    return made


@pytest.mark.parametrize("count, batch, pool", [(23, 4, 64), (23, 4, 2), (23, 5, 1), (7, 8, 4), (24, 8, 3), (1, 1, 2)])
def test_an_epoch_has_every_item_once_and_the_last_step_the_remainder(count, batch, pool) -> None:
    lengths = np.arange(count) * 17 % 11
    for epoch in range(3):
        steps = epoch_steps(lengths, batch, pool, seed=3, epoch=epoch)
        assert sorted(np.concatenate(steps).tolist()) == list(range(count))
        sizes = sorted((len(step) for step in steps), reverse=True)
        assert len(steps) == -(-count // batch) and sizes[:-1] == [batch] * (len(steps) - 1)


def test_steps_have_similar_lengths_and_a_new_order_each_epoch() -> None:
    lengths = np.random.default_rng(0).integers(5, 200, 4000)
    spread = {
        pool: np.mean([np.ptp(lengths[step]) for step in epoch_steps(lengths, 32, pool, 1, 0)]) for pool in (1, 64)
    }
    assert spread[64] < spread[1] / 10
    first, second = (np.concatenate(epoch_steps(lengths, 32, 64, 1, epoch)) for epoch in (0, 1))
    assert (first != second).mean() > 0.9
    means = [lengths[step].mean() for step in epoch_steps(lengths, 32, 64, 1, 0)]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.3  # short and long ones mixed


@pytest.mark.parametrize("name", ["qqp", "race", "squad_v1"])
@pytest.mark.parametrize("dp_size, micro", [(1, 3), (2, 3), (3, 2), (5, 8)])
def test_every_layout_divides_the_same_steps(sets, name, dp_size, micro) -> None:
    features = sets[name]
    whole = list(TrainingSteps(features, 4, 4, 2, seed=7, pool_batches=3))
    ranks = [list(TrainingSteps(features, 4, micro, 2, 7, 3, rank, dp_size)) for rank in range(dp_size)]
    assert all(len(steps) == len(whole) for steps in ranks)

    def items(batch) -> list[int]:
        """The item of each row of `weights`, from the dropout numbers of its sequences."""
        numbers = batch["dropout_numbers"].view(-1, features.num_choices)
        assert torch.equal(numbers, numbers[:, :1] + torch.arange(features.num_choices))
        return (numbers[:, 0] // features.num_choices).tolist()

    seen = []
    for number, step in enumerate(whole):
        parts = [batch for steps in ranks for batch in steps[number]]
        assert all(len(steps[number]) >= 1 for steps in ranks)
        scored = [item for part in parts for item, w in zip(items(part), part["weights"], strict=True) if w > 0]
        assert sorted(scored) == sorted(items(step[0]))
        labels = {n: row.tolist() for part in parts for n, row in zip(items(part), part["labels"], strict=True)}
        assert labels == {n: row.tolist() for n, row in zip(items(step[0]), step[0]["labels"], strict=True)}
        assert sum(part["weights"].sum() for part in parts) == len(step[0]["weights"])
        seen += scored
    assert sorted(seen) == list(range(2 * len(features)))


@pytest.mark.parametrize("dp_size", [1, 2, 3, 40])
@pytest.mark.parametrize("num_sequences", [1, 7, 64])
def test_every_item_is_scored_once_over_the_ranks(sets, dp_size, num_sequences) -> None:
    batches = [batch for rank in range(dp_size) for batch in ScoringBatches(sets, num_sequences, rank, dp_size)]
    for name, features in sets.items():
        items = np.concatenate([batch["items"] for batch in batches if batch["set"] == name])
        assert sorted(items.tolist()) == list(range(len(features)))
        largest = max(num_sequences, features.num_choices)  # an item is not divided
        assert all(len(batch["tokens"]) <= largest for batch in batches if batch["set"] == name)


@pytest.mark.parametrize("name", ["qqp", "race", "squad_v1"])
def test_a_batch_is_padded_to_its_longest_sequence(sets, name) -> None:
    features, items = sets[name], np.array([4, 0, 11])
    batch = collate(features, items)
    rows = [item * features.num_choices + choice for item in items for choice in range(features.num_choices)]
    longest = max(features.starts[row + 1] - features.starts[row] for row in rows)
    assert batch["tokens"].shape == (len(rows), longest)
    for place, row in enumerate(rows):
        ids = features.tokens[features.starts[row] : features.starts[row + 1]].tolist()
        kept = batch["attention_mask"][place]
        assert batch["tokens"][place][kept].tolist() == ids and kept.sum() == len(ids) and kept[: len(ids)].all()
        types = [int(i >= features.second_starts[row]) for i in range(len(ids))]
        assert batch["token_types"][place][kept].tolist() == types
    assert batch["labels"].tolist() == features.labels[items].tolist()


def test_a_batch_without_padding_has_no_mask(sets) -> None:
    assert collate(sets["qqp"], np.array([3]))["attention_mask"] is None
