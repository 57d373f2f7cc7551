"""A finetuned run as a folder that transformers alone loads: our ids, logits and classes, through files."""

import csv
import gzip
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import GPT, change_metadata, family_config, spoil
from finetune_runs import make_checkpoint, make_run, read_logits, read_metrics, run_finetunings, run_here
from finetuned_folders import OWN, PREFIX, SAVED, publish, score_again, take_back

from lmscale.checkpoint import Checkpoint, CheckpointError, latest_checkpoint
from lmscale.config.data import TokenizerConfig
from lmscale.config.finetune import FinetuneConfig
from lmscale.data.tokenizer import load_published_tokenizer
from lmscale.finetune.outputs import read_outputs
from lmscale.finetune.publishing import read_head
from lmscale.finetune.scoring import predict_sets
from lmscale.finetune.tasks import benchmark_of, read_examples
from lmscale.hugging_face.conversion import export_hugging_face
from lmscale.models.hugging_face import model_of

FILES = {
    "mnli": "mnli/dev_matched.shared.tsv",
    "qqp": "qqp/with_ids.shared.tsv",
    "race": "race/race_dev.jsonl.gz",
    "squad_v1": "squad/dev-v1.1.shared.json",
    "squad_v2": "squad/dev-v2.0.shared.json",
    "sst2": "glue/SST-2/dev.shared.tsv",
    "stsb": "glue/STS-B/dev.shared.tsv",
}
HEADS = dict.fromkeys(FILES, "SequenceClassification") | {"race": "MultipleChoice"}
HEADS |= dict.fromkeys(("squad_v1", "squad_v2"), "QuestionAnswering")
BASES = {"base_hidden_size": 8, "base_head_size": 4, "base_num_layers": 1}


def real_rows(data: Path, name: str, folder: Path) -> Path:
    """The first 100 examples of a published development set, in its own layout."""
    place = data / FILES[name]
    if name.startswith("squad"):
        values, left = json.loads(place.read_text(encoding="utf-8")), 100
        for paragraph in values["data"][0]["paragraphs"]:
            paragraph["qas"] = paragraph["qas"][:left]
            left -= len(paragraph["qas"])
        text = json.dumps(values | {"data": values["data"][:1]})
    elif name == "race":
        with gzip.open(place, "rt", encoding="utf-8") as file:
            text = "".join(next(file) for _ in range(26))
    else:
        text = "".join(place.read_text(encoding="utf-8").splitlines(keepends=True)[:101])
    path = folder / f"{name}{place.with_suffix('').suffix if place.suffix == '.gz' else place.suffix}"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def finetuned(request, shared_data, tmp_path_factory) -> dict[str, tuple[FinetuneConfig, str]]:
    """A finetuning of every task on real rows, and its norm order: over both layouts, every head has both orders."""
    folder, tp_size = tmp_path_factory.mktemp("real"), request.param
    tokenizer = load_published_tokenizer(TokenizerConfig("bert", path=str(shared_data / "bert-uncased")), "bert")
    sizes = {"max_position_embeddings": 128, "tokenizer": tokenizer}
    rules = {"parametrization": "completep", "initializer_std": 0.9, **BASES}
    ckpts = {
        "pre": make_checkpoint(folder / "pre", norm_order="pre", **rules, **sizes),
        "post": make_checkpoint(folder / "post", norm_order="post", initializer_std=0.3, **sizes),
    }
    runs = {}
    for number, name in enumerate(HEADS):
        order = ("pre", "post")[(number + tp_size) % 2]
        (folder / name).mkdir()
        place = str(real_rows(shared_data, name, folder))
        lengths = {"task__max_seq_length": 96}
        lengths |= {"task__max_query_length": 40, "task__doc_stride": 32} if name.startswith("squad") else {}
        lengths |= {"task__max_qa_length": 64} if name == "race" else {}
        lengths |= {"task__null_threshold": {"pre": -5.0, "post": 1.0}[order]} if name == "squad_v2" else {}
        learned = {"trainer__num_epochs": 2, "trainer__max_train_examples": 32, "trainer__score_every_epoch": False}
        learned |= {"optimizer__lr": 1e-5, "seed": 3} if name == "stsb" else {}  # some numbers are below 0
        sets = {"task__train": place, "task__validation": {"dev": place}, "parallel__tp_size": tp_size}
        runs[name] = make_run(name, folder / name, ckpts[order], **sets, **lengths, **learned, **SAVED), order
    run_finetunings([run for run, _ in runs.values()], tp_size)
    return runs


def their_inputs(run: FinetuneConfig, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The inputs of each item, as the tokenizer of the folder makes them from the texts."""
    tokenizer, inputs = transformers.AutoTokenizer.from_pretrained(folder), []
    for example in read_examples(run.task, run.task.validation["dev"])[0]:
        if run.task.name.startswith("squad"):
            window = run.task.max_seq_length - len(tokenizer(example.question)["input_ids"]) - 1
            windows = {"stride": window - run.task.doc_stride, "return_overflowing_tokens": True}
            cut = {"truncation": "only_second", "padding": True, "return_tensors": "pt"}
            found = tokenizer(example.question, example.context, **windows, **cut)
            for row in range(len(found["input_ids"])):
                length = found["attention_mask"][row].sum()
                inputs.append({key: found[key][row : row + 1, :length] for key in tokenizer.model_input_names})
        elif run.task.name == "race":
            gap = "_" in example.question
            firsts = [example.question.replace("_", o) if gap else f"{example.question} {o}" for o in example.options]
            articles = [example.article] * len(firsts)
            found = tokenizer(firsts, articles, truncation="only_second", padding=True, return_tensors="pt")
            inputs.append({key: value[None] for key, value in found.items()})
        else:
            inputs.append(tokenizer(example.first, example.second, truncation="only_second", return_tensors="pt"))
    return inputs


def their_logits(model: torch.nn.Module, inputs: list[dict[str, torch.Tensor]]) -> list[np.ndarray]:
    """The logits of each item in our form: [classes], [1], [choices] or [2, tokens]."""
    with torch.inference_mode():
        outputs = [model(**each) for each in inputs]
    if "start_logits" in outputs[0]:
        return [torch.cat([each.start_logits, each.end_logits]).numpy() for each in outputs]
    return [each.logits[0].numpy() for each in outputs]


def largest_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", HEADS)
def test_the_folder_gives_our_ids_logits_and_answers_of_real_rows(finetuned, name: str) -> None:
    run, order = finetuned[name]
    folder = publish(run)
    auto = getattr(transformers, f"AutoModelFor{HEADS[name]}")
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == f"{PREFIX[order]}For{HEADS[name]}" and not any(report.values()), report
    outputs = read_outputs(Path(run.run_dir) / "predictions" / "dev")
    features, inputs = outputs.features, their_inputs(run, folder)
    ids = torch.cat([each["input_ids"][each["attention_mask"].bool()] for each in inputs])
    assert torch.equal(ids, torch.tensor(features.tokens, dtype=torch.int64))
    assert any(np.diff(features.starts) == 96) == (name in ("race", "squad_v1", "squad_v2"))  # some were truncated
    assert len(features.ids) == 100 and np.ptp(np.concatenate([row.ravel() for row in outputs.logits])) > 1.0
    theirs = their_logits(model, inputs)
    difference = largest_difference(outputs.logits, theirs)
    print(f"{name} {order}: {difference:.1e}")
    assert difference < 1e-5
    found, metrics = predict_sets(run.task, {"dev": features}, {"dev": theirs}, ["dev"])
    assert metrics == pytest.approx({key: read_metrics(run)[key] for key in metrics}, abs=1e-4)
    if name.startswith("squad"):
        expected = json.loads((Path(run.run_dir) / "predictions/dev/predictions.json").read_text(encoding="utf-8"))
        assert found["dev"].answers == expected
        assert len({*expected.values()}) > 10 and ("" in expected.values() or name == "squad_v1")


@pytest.mark.parametrize("name, file", [("mnli", "MNLI-m.tsv"), ("qqp", "QQP.tsv"), ("sst2", "SST-2.tsv")])
def test_the_pipeline_gives_our_classes(finetuned, name: str, file: str) -> None:
    run, _ = finetuned[name]
    found = classify(run, top_k=None)
    predictions = Path(run.run_dir) / "predictions" / "dev"
    with (predictions / file).open(encoding="utf-8") as rows:
        expected = [row["prediction"] for row in csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE)]
    assert [scores[0]["label"] for scores in found] == expected and len({*expected}) > 1
    probabilities = torch.tensor(np.array(read_outputs(predictions).logits)).softmax(dim=1)
    for scores, row in zip(found, probabilities, strict=True):
        by_class = {each["label"]: each["score"] for each in scores}
        assert [by_class[label] for label in benchmark_of(run.task).classes] == pytest.approx(row.tolist(), abs=1e-5)


def test_the_pipeline_gives_our_numbers_as_they_are(finetuned) -> None:
    run, _ = finetuned["stsb"]
    found, expected = [each["score"] for each in classify(run)], read_logits(run)[:, 0]
    assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert not (expected.min() >= 0 and expected.max() <= 5)  # neither a sigmoid nor a limit


def classify(run: FinetuneConfig, **settings) -> list:
    """What a pipeline says of the texts of the scored set."""
    pipeline = transformers.pipeline("text-classification", model=str(publish(run, "again")), truncation="only_second")
    examples, _ = read_examples(run.task, run.task.validation["dev"])
    return pipeline([{"text": each.first, "text_pair": each.second} for each in examples], **settings)


@pytest.mark.parametrize("name", HEADS)
def test_a_published_run_comes_back_with_its_logits_at_another_layout(finetuned, tmp_path, name: str) -> None:
    run, _ = finetuned[name]
    folder = publish(run, "to_come_back")
    values = json.loads((folder / "config.json").read_text())
    ours = take_back(folder, tmp_path / "ours", 4 // run.parallel.tp_size)
    again = score_again(run, ours, tmp_path)
    assert run_here(again) == 0
    assert np.abs(read_logits(again) - read_logits(run)).max() < 1e-5
    scores = {key: value for key, value in read_metrics(again).items() if key.startswith(name)}
    assert scores == pytest.approx({key: read_metrics(run)[key] for key in scores}, abs=1e-4) and scores
    with pytest.raises(ValueError, match="must have been finetuned here to be published, but its head is from "):
        read_head(latest_checkpoint(ours))
    assert values["architectures"][0] in {f"{prefix}For{HEADS[name]}" for prefix in PREFIX.values()}


@pytest.fixture(scope="module")
def ckpts(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ckpts")
    return {order: make_checkpoint(folder / order, norm_order=order) for order in PREFIX}


@pytest.fixture(scope="module")
def run(ckpts, tmp_path_factory) -> FinetuneConfig:
    run = make_run("qqp", tmp_path_factory.mktemp("run"), ckpts["post"], **SAVED)
    assert run_here(run) == 0
    return run


@pytest.mark.parametrize("name", ["own", "qqp", "stsb", "race", "squad_v1", "squad_v2"])
def test_the_example_of_the_card_runs_as_it_is_written(ckpts, tmp_path, monkeypatch, capsys, name: str) -> None:
    changes = {"task__name": "own", "task__columns": OWN, "task__labels": ["1", "0"]} if name == "own" else {}
    run = make_run("qqp" if name == "own" else name, tmp_path, ckpts["pre"], **changes, **SAVED)
    assert run_here(run) == 0
    capsys.readouterr()
    monkeypatch.chdir(run.run_dir)
    card = (publish(run) / "README.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(card.split("```python\n")[1].split("```")[0], names)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1
    said = "  # `score` is the number; labels are from 0 to 5, predictions are not limited to that"
    assert (said in card) == (name == "stsb")
    assert ('truncation="only_second"' in card) == (name in ("qqp", "stsb", "race"))
    if name.startswith("squad"):
        assert (names["allowed"].nonzero() @ torch.tensor([-1, 1])).max() == run.task.max_answer_length - 1
    if name == "squad_v2":
        saved = Checkpoint.open(latest_checkpoint(run.run_dir)).metadata.state["finetune"]["metrics"]
        found = saved["squad_v2/null_threshold"]
        threshold = f'float("{found}")' if isinstance(found, str) else found
        assert f" > {threshold}:  # squad_v2/null_threshold of this run" in card
    if name in ("own", "stsb"):
        assert names["classify"].tokenizer.model_max_length == run.task.max_seq_length
        examples, _ = read_examples(run.task, run.task.validation["dev"])
        found = names["classify"]([{"text": each.first, "text_pair": each.second} for each in examples])
        logits = read_logits(run)
        if name == "own":
            assert [each["label"] for each in found] == [run.task.labels[row.argmax()] for row in logits]
        else:
            assert [each["score"] for each in found] == pytest.approx(logits[:, 0].tolist(), abs=1e-5)
    assert f"| {run.task.name}/" in card and "| task | " in card and "| examples of" not in card


@pytest.mark.parametrize("name, has_dropout", [("qqp", True), ("stsb", True), ("squad_v1", False)])
def test_the_dropout_of_the_head_is_kept_or_said_to_change_no_evaluation(
    ckpts, tmp_path, caplog, name, has_dropout
) -> None:
    runs = {
        order: make_run(name, tmp_path, ckpt, run=order, head_dropout=0.3, **SAVED) for order, ckpt in ckpts.items()
    }
    assert [run_here(run) for run in runs.values()] == [0, 0]
    with caplog.at_level(logging.INFO):
        values = {order: json.loads((publish(run) / "config.json").read_text()) for order, run in runs.items()}
    assert values["post"]["classifier_dropout"] == (0.3 if has_dropout else None)
    assert "classifier_dropout" not in values["pre"]
    said = "MegatronBertForSequenceClassification has no dropout of its own before the head (here 0.3)"
    assert [message.startswith(said) for message in caplog.messages].count(True) == has_dropout
    assert ("no dropout" in caplog.text) == has_dropout


def test_the_card_says_that_a_score_is_undefined(run, tmp_path) -> None:
    path = latest_checkpoint(run.run_dir)
    copy = shutil.copytree(path, tmp_path / path.name)
    change_metadata(copy, lambda values: values["state"]["finetune"]["metrics"].update({"qqp/f1": "nan"}))
    scores = read_head(copy).scores
    assert scores["qqp/f1"] == "undefined" and scores["qqp/accuracy"].endswith(" %")


def lose_task(values: dict) -> None:
    del values["run"]["task"]


def change_head(values: dict) -> None:
    values["run"]["task"] |= {"name": "own", "columns": OWN, "labels": ["a", "b", "c"], "metrics": None}


FOREIGN = {
    "no task": (lose_task, "has an invalid finetuning (KeyError: 'task')"),
    "an unknown task": (lambda v: v["run"]["task"].update(columns=None), "`task.name` must be one of squad_v1, "),
    "no scores": (lambda v: v["state"].update(finetune=[]), "has an invalid finetuning (TypeError: "),
    "a score that is no number": (lambda v: v["state"]["finetune"].update(metrics={"a": "x"}), "could not convert"),
    "more classes than outputs": (change_head, "model/head.weight must be (3, 32), but is (2, 32)"),
    "another family": (lambda v: v["model"].update(family="gpt"), "is of a model without"),
    "an embedding dropout": (lambda v: v["model"].update(embedding_dropout=0.4), "`embedding_dropout` of a BERT must"),
}


@pytest.mark.parametrize("mistake", FOREIGN)
def test_a_foreign_checkpoint_is_refused_in_one_line(run, tmp_path, mistake: str) -> None:
    change, message = FOREIGN[mistake]
    path = latest_checkpoint(run.run_dir)
    copy = shutil.copytree(path, tmp_path / path.name)
    change_metadata(copy, change)
    with pytest.raises(ValueError) as caught:
        export_hugging_face(copy, tmp_path / "target", head=read_head(copy))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [copy]


def test_a_finetuned_gpt_has_no_class() -> None:
    with pytest.raises(ValueError, match="a finetuned model must be a BERT for Hugging Face, but is a gpt2"):
        model_of(family_config(GPT)).with_head("classification")


@pytest.mark.parametrize("spoilt", ["classifier.weight", "classifier.bias", "bert.pooler.dense.bias"])
def test_one_wrong_number_in_the_head_is_noticed(run, tmp_path, monkeypatch, spoilt: str) -> None:
    spoil(monkeypatch, spoilt)
    path = latest_checkpoint(run.run_dir)
    with pytest.raises(CheckpointError, match="does not compute the same"):
        export_hugging_face(path, tmp_path / "target", head=read_head(path))
    assert list(tmp_path.iterdir()) == []
