"""A finetuned model that transformers made, imported: scored and finetuned further, or refused in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config, edit_tensors
from finetune_runs import make_checkpoint, make_run, read_logits, read_metrics, read_rows, run_here
from finetuned_folders import OWN, PREFIX, SAVED, publish, save_classifier, score_again, take_back

from lmscale.checkpoint import CheckpointError
from lmscale.finetune.metrics import pearson, spearman
from lmscale.finetune.preparing import prepare_job
from lmscale.finetune.publishing import read_published_head
from lmscale.finetune.tasks import benchmark_of, read_examples


@pytest.fixture(scope="module")
def ckpts(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ckpts")
    return {order: make_checkpoint(folder / order, norm_order=order) for order in PREFIX}


ORDERS = (["neutral", "contradiction", "entailment"], ["entailment", "neutral", "contradiction"])


@pytest.mark.parametrize("labels", ORDERS)
@pytest.mark.parametrize("order", PREFIX)
def test_a_model_of_transformers_is_scored_whatever_the_order_of_its_classes(ckpts, tmp_path, order, labels) -> None:
    classes = {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    theirs, tokenizer = save_classifier(tmp_path / "theirs", ckpts[order], order, **classes)
    run = make_run("mnli", tmp_path, take_back(tmp_path / "theirs", tmp_path / "ours"), trainer__num_epochs=0)
    assert run_here(run) == 0
    examples, _ = read_examples(run.task, run.task.validation["dev"])
    inputs = tokenizer([e.first for e in examples], [e.second for e in examples], padding=True, return_tensors="pt")
    with torch.inference_mode():
        expected = theirs(**inputs).logits.numpy()[:, [labels.index(name) for name in benchmark_of(run.task).classes]]
    assert np.abs(read_logits(run) - expected).max() < 1e-5 < np.ptp(expected, axis=0).min()
    # the head is the start of a finetuning too, and the next checkpoint has the task's order
    more = make_run("mnli", tmp_path, tmp_path / "ours", run="more", optimizer__lr=1e-9, **SAVED)
    assert run_here(more) == 0
    assert np.abs(read_logits(more) - expected).max() < 1e-5
    again = make_run("mnli", tmp_path, Path(more.run_dir), run="again", trainer__num_epochs=0)
    assert run_here(again) == 0
    assert np.abs(read_logits(again) - expected).max() < 1e-5


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("order", PREFIX)
def test_a_number_of_transformers_is_scored_and_learned_further(ckpts, tmp_path, order, is_trained) -> None:
    theirs, tokenizer = save_classifier(tmp_path / "theirs", ckpts[order], order, num_labels=1)
    run = make_run("stsb", tmp_path, tmp_path / "ours", trainer__num_epochs=0)

    def compute(place: str) -> tuple[torch.Tensor, torch.Tensor]:
        examples, _ = read_examples(run.task, place)
        texts = [e.first for e in examples], [e.second for e in examples]
        labels = torch.tensor([e.label for e in examples], dtype=torch.float32)
        outputs = theirs(**tokenizer(*texts, padding=True, return_tensors="pt"), labels=labels)
        return outputs.loss, outputs.logits[:, 0].detach()

    if is_trained:
        optimizer = torch.optim.SGD(theirs.parameters(), lr=1e-4)
        compute(run.task.train)[0].backward()  # which writes its `problem_type`
        optimizer.step()
        theirs.save_pretrained(tmp_path / "theirs")
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert values.get("problem_type") == ("regression" if is_trained else None)
    take_back(tmp_path / "theirs", tmp_path / "ours")
    assert run_here(run) == 0
    _, expected = compute(run.task.validation["dev"])
    assert np.abs(read_logits(run)[:, 0] - expected.numpy()).max() < 1e-5 < np.ptp(expected.numpy())
    labels = [e.label for e in read_examples(run.task, run.task.validation["dev"])[0]]
    scores = read_metrics(run)
    assert scores["stsb/pearson"] == pytest.approx(pearson(expected.tolist(), labels), abs=0.01)
    assert scores["stsb/spearman"] == pytest.approx(spearman(expected.tolist(), labels))
    longer = {"global_batch_size": 22, "trainer__num_epochs": 3}  # one step per epoch
    more = make_run("stsb", tmp_path, tmp_path / "ours", run="more", **longer, **SAVED)
    assert run_here(more) == 0
    assert read_rows(more)[0]["train/loss"] == pytest.approx(compute(run.task.train)[0].item(), rel=1e-5)
    again = make_run("stsb", tmp_path, Path(more.run_dir), run="again", trainer__num_epochs=0)
    assert run_here(again) == 0
    assert (
        np.abs(read_logits(again) - read_logits(more)).max() < 1e-5 < np.abs(read_logits(more) - read_logits(run)).max()
    )


@pytest.mark.parametrize("num_labels, kind, other", [(1, "regression", "qqp"), (2, "classification", "stsb")])
def test_a_head_of_another_kind_is_not_scored_and_is_drawn_anew(ckpts, tmp_path, num_labels, kind, other) -> None:
    save_classifier(tmp_path / "theirs", ckpts["post"], "post", num_labels=num_labels)
    ours = take_back(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(ValueError) as caught:
        prepare_job(make_run(other, tmp_path, ours, trainer__num_epochs=0))
    rule = f"`ckpt` must have been finetuned on {other} if `trainer.num_epochs` is 0"
    assert str(caught.value) == f"{rule}, but step_0.ckpt was finetuned on {kind}"
    runs = [make_run(other, tmp_path, ours, run=str(seed), seed=seed, optimizer__lr=1e-9) for seed in (1, 2)]
    assert [run_here(run) for run in runs] == [0, 0]
    assert np.abs(read_logits(runs[0]) - read_logits(runs[1])).max() > 1e-3


def test_other_classes_need_a_task_that_names_them(ckpts, tmp_path) -> None:
    save_classifier(tmp_path / "theirs", ckpts["post"], "post")
    ours = take_back(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(ValueError, match="was finetuned on the classes LABEL_0, LABEL_1, not 0, 1 .`id2label` of"):
        prepare_job(make_run("qqp", tmp_path, ours, trainer__num_epochs=0))
    edit_config(tmp_path / "theirs", model_type=None, architectures=["BertForMaskedLM"])
    assert read_published_head(tmp_path / "theirs") is None  # as configurations of 2019
    with pytest.raises(ValueError, match="was finetuned on classification"):
        prepare_job(make_run("race", tmp_path, ours, trainer__num_epochs=0))
    own = {"task__name": "own", "task__columns": OWN, "task__labels": ["LABEL_0", "LABEL_1"]}
    assert run_here(make_run("qqp", tmp_path, ours, trainer__num_epochs=0, **own)) == 0


def test_the_pooler_that_old_files_of_squad_have_is_not_read(ckpts, tmp_path) -> None:
    run = make_run("squad_v1", tmp_path, ckpts["post"], **SAVED)
    assert run_here(run) == 0
    folder = publish(run)
    edit_tensors(folder, lambda tensors: tensors.update({"bert.pooler.dense.weight": torch.ones(32, 32)}))
    ours = take_back(folder, tmp_path / "ours")
    again = score_again(run, ours, tmp_path)
    assert run_here(again) == 0 and np.abs(read_logits(again) - read_logits(run)).max() < 1e-5
    edit_tensors(folder, lambda tensors: tensors.update({"cls.predictions.bias": torch.ones(32)}))
    with pytest.raises(CheckpointError, match="no tensor of ours takes cls.predictions.bias"):
        take_back(folder, tmp_path / "other")


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"problem_type": "multi_label_classification"},
            "theirs must have one of several classes or a number per input, but config.json has "
            "multi_label_classification with 2 labels",
        ),
        ({"problem_type": "regression"}, "but config.json has regression with 2 labels"),
        (
            {"problem_type": "multi_label_classification", "id2label": {0: "a"}, "label2id": {"a": 0}},
            "but config.json has multi_label_classification with 1 labels",
        ),
        ({"id2label": {}}, "but config.json has no problem_type with 0 labels"),
        (
            {"id2label": {0: "a", 1: "a"}},
            "`id2label` of config.json must name each class once, as text, but is {0: 'a', 1: 'a'}",
        ),
        (
            {"id2label": {0: "a", 2: "b"}},
            "`id2label` of config.json must name each class once, as text, but is {0: 'a', 2: 'b'}",
        ),
        ({"id2label": {0: 0, 1: 1}}, "must name each class once, as text, but is {0: 0, 1: 1}"),
        (
            {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 1, "b": 0}},
            "`label2id` of config.json must number the classes as `id2label`, {0: 'a', 1: 'b'}, "
            "but is {'a': 1, 'b': 0}",
        ),
    ],
)
def test_a_classifier_that_ours_is_not_is_refused_in_one_line(ckpts, tmp_path, settings, message) -> None:
    save_classifier(tmp_path / "theirs", ckpts["post"], "post")
    edit_config(tmp_path / "theirs", **settings)
    with pytest.raises(ValueError) as caught:
        read_published_head(tmp_path / "theirs")
    assert message in str(caught.value) and "\n" not in str(caught.value)
