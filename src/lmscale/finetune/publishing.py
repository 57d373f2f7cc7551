"""What a conversion to or from Hugging Face must know of a finetuned model: its head, and what its model card says."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import METADATA, Checkpoint, CheckpointMetadata
from ..checkpoint.model_tensors import meta_model
from ..config import TransformerConfig
from ..config.finetune import FROM_HUB, TaskConfig
from ..config.from_dict import build
from ..hugging_face.config import hf_model, read_hf_config, with_defaults
from ..hugging_face.finetuned_head import FinetunedHead, PublishedHead
from .heads import FinetuneModel
from .scoring import with_units
from .tasks import HeadKind, benchmark_of

_TAGS = {
    HeadKind.CLASSIFICATION: "text-classification",
    HeadKind.REGRESSION: "text-classification",
    HeadKind.CHOICE: "multiple-choice",
    HeadKind.SPAN: "question-answering",
}
_CLASSIFY = """from transformers import pipeline

classify = pipeline("text-classification", model="FOLDER", truncation={truncation})
print(classify({texts})){meaning}"""
_CHOOSE = """from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForMultipleChoice.from_pretrained("FOLDER")
article = "A cat sat on a mat and slept."
options = ["What did the cat do? It slept.", "What did the cat do? It ran."]
inputs = tokenizer(options, [article] * len(options), truncation="only_second", padding=True, return_tensors="pt")
scores = model(**{{name: value[None] for name, value in inputs.items()}}).logits[0]
print(options[scores.argmax()])"""
_ANSWER = """import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForQuestionAnswering.from_pretrained("FOLDER")
context = "A cat sat on a mat and slept."
inputs = tokenizer("What did the cat do?", context, return_tensors="pt")
outputs = model(**inputs)
scores = outputs.start_logits[0][:, None] + outputs.end_logits[0]  # of spans from a token to another
in_context = torch.tensor([text == 1 for text in inputs.sequence_ids()])
allowed = (in_context[:, None] & in_context).triu().tril({longest})
best, place = scores.masked_fill(~allowed, -torch.inf).flatten().max(dim=0)
first, last = divmod(place.item(), len(scores))
answer = context[inputs.token_to_chars(first).start : inputs.token_to_chars(last).end]
{no_answer}print(answer)"""
_NO_ANSWER = """if scores[0, 0] - best > {threshold}:  # {origin}
    answer = "no answer"
"""


def read_head(path: Path) -> PublishedHead | None:
    """The head of the checkpoint at `path`; None if it has not been finetuned.

    Raises:
        CheckpointError: its metadata is damaged.
        ValueError: it has an invalid task, or its head was imported.
    """
    metadata = Checkpoint.open(path).metadata
    if "finetune" not in metadata.state:
        return None
    if "kind" in metadata.state["finetune"]:
        origin = metadata.run.get("converted_from")
        raise ValueError(f"`source` must have been finetuned here to be published, but its head is from {origin}")
    try:
        return _describe(metadata)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"checkpoint {path.name}: {METADATA} has an invalid finetuning ({text})") from None


def _describe(metadata: CheckpointMetadata) -> PublishedHead:
    run = metadata.run
    task, metrics = build(TaskConfig, run["task"], "task."), metadata.state["finetune"]["metrics"]
    benchmark = benchmark_of(task)
    kind = benchmark.head
    return PublishedHead(
        kind=kind.value,
        classes=benchmark.classes if kind is HeadKind.CLASSIFICATION else (),
        build=_builder(kind, benchmark.num_outputs),
        max_seq_length=task.max_seq_length,
        dropout=None if kind is HeadKind.SPAN else run["head_dropout"],
        pipeline_tag=_TAGS[kind],
        training=_training(metadata, task),
        scores={name: _score(float(entry["value"]), entry["unit"]) for name, entry in with_units(metrics).items()},
        example=_example(kind, task, metrics),
    )


def _score(value: float, unit: str) -> str:
    return "undefined" if math.isnan(value) else f"{value:.6g} {unit}"


def _builder(kind: HeadKind, num_outputs: int) -> Callable[[TransformerConfig], nn.Module]:
    def build_on_meta(config: TransformerConfig) -> nn.Module:
        with torch.device("meta"):  # a comparison has one input per choice, and transformers two outputs for spans
            outputs = 1 if kind is HeadKind.CHOICE else num_outputs
            model = FinetuneModel(meta_model(config), kind, outputs, head_dropout=0.0)
        if kind is HeadKind.SPAN:
            model.register_forward_hook(lambda *call: call[-1].unbind(1))
        return model

    return build_on_meta


def read_published_head(folder: Path) -> FinetunedHead | None:
    """The head of a finetuned model in a folder of Hugging Face; None if it has none that we have.

    Raises:
        ValueError: the configuration is invalid, or of another problem than one class per input.
    """
    values = read_hf_config(folder / "config.json")
    # The tensors tell the type that files of 2019 leave out; such a model is taken for a pretrained one.
    found = hf_model(values).kind_of(values.get("architectures")) if values.get("model_type") is not None else None
    if found is None:
        return None
    kind, classes = HeadKind(found), ()
    if kind is HeadKind.CLASSIFICATION:
        published = with_defaults(values)
        if published.num_labels == 1 and published.problem_type in (None, "regression"):  # as transformers takes it
            kind = HeadKind.REGRESSION
    if kind is HeadKind.CLASSIFICATION:
        if published.problem_type not in (None, "single_label_classification") or published.num_labels < 2:
            problem = f"{published.problem_type or 'no problem_type'} with {published.num_labels} labels"
            raise ValueError(
                f"{folder} must have one of several classes or a number per input, but config.json has {problem}"
            )
        classes = tuple(published.id2label.get(number) for number in range(published.num_labels))
        if not all(isinstance(name, str) for name in classes) or len({*classes}) < len(classes):
            raise ValueError(
                f"`id2label` of config.json must name each class once, as text, but is {published.id2label}"
            )
        # Names that only one of the two has say nothing of the order: many files have LABEL_0 and so on in one.
        numbers = published.label2id or {}
        if any(str(numbers.get(name, number)) != str(number) for number, name in enumerate(classes)):
            raise ValueError(
                f"`label2id` of config.json must number the classes as `id2label`, {published.id2label}, "
                f"but is {numbers}"
            )
    return FinetunedHead(kind.value, classes, _builder(kind, len(classes) or (1 if kind is HeadKind.REGRESSION else 2)))


def _training(metadata: CheckpointMetadata, task: TaskConfig) -> dict[str, Any]:
    run = metadata.run
    place = f"{task.hub_name}, {task.train}" if str(task.train).startswith(FROM_HUB) else Path(str(task.train)).name
    return {
        "task": f"{task.name}, {place}",
        "finetuned from": Path(run["ckpt"]).name,
        "epochs": run["trainer"]["num_epochs"],
        "steps": f"{metadata.step:,}",
        "batch": f"{run['global_batch_size']:,} examples of at most {task.max_seq_length:,} tokens",
        "learning rate": run["optimizer"]["lr"],
        "precision": run["precision"]["dtype"],
        "seed": run["seed"],
    }


def _example(kind: HeadKind, task: TaskConfig, metrics: dict[str, Any]) -> str:
    if kind in (HeadKind.CLASSIFICATION, HeadKind.REGRESSION):
        meaning = ""
        if kind is HeadKind.REGRESSION:
            low, high = task.value_range
            meaning = (
                f"  # `score` is the number; labels are from {low:g} to {high:g}, predictions are not limited to that"
            )
        if task.layouts[0].get("second") is None:
            return _CLASSIFY.format(truncation=True, texts='"A cat sat on a mat."', meaning=meaning)
        pair = '{"text": "A cat sat on a mat.", "text_pair": "Where did the cat sit?"}'
        return _CLASSIFY.format(truncation='"only_second"', texts=pair, meaning=meaning)
    if kind is HeadKind.CHOICE:
        return _CHOOSE.format()
    no_answer = ""
    if task.name == "squad_v2":
        found = metrics.get("squad_v2/null_threshold", task.null_threshold)
        threshold = 0.0 if found is None else float(found)
        shown = threshold if math.isfinite(threshold) else f'float("{threshold}")'
        origin = "not tuned" if found is None else "squad_v2/null_threshold of this run"
        no_answer = _NO_ANSWER.format(threshold=shown, origin=origin)
    return _ANSWER.format(longest=task.max_answer_length - 1, no_answer=no_answer)
