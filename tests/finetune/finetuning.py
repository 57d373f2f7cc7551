"""Small tasks, tokenizers and examples for the tests of finetuning."""

import json
from pathlib import Path

import yaml

from lmscale.config.finetune import TaskConfig
from lmscale.data.tokenizer import Tokenizer, train_tokenizer

TASK_FILES = Path(__file__).resolve().parents[2] / "conf" / "finetune" / "task"
LENGTHS = {
    "race": {"max_seq_length": 48, "max_qa_length": 16},
    "squad_v1": {"max_seq_length": 40, "doc_stride": 8, "max_query_length": 12},
    "squad_v2": {"max_seq_length": 40, "doc_stride": 8, "max_query_length": 12},
}
WORDS = "some cat dog owl fox sat ran slept sang on under by near".split()
WORDS += "one red blue green old small house tree river hill".split()


def task_values(name: str) -> dict:
    """The values of a task with short inputs and no data paths."""
    values = yaml.safe_load((TASK_FILES / f"{name}.yaml").read_text(encoding="utf-8"))
    values = {key: value for key, value in values.items() if key not in ("defaults", "hub_subset")}
    values |= {"train": None, "validation": {}, "test": {}, "hub_name": "none", "max_seq_length": 32}
    values |= LENGTHS.get(name, {})
    return values | ({"max_answer_length": 8, "num_best": 5} if name.startswith("squad") else {})


def make_task(name: str, **changes) -> TaskConfig:
    """A task with short inputs and no data paths."""
    return TaskConfig(**task_values(name) | changes)


def make_tokenizer() -> Tokenizer:
    """A WordPiece of the examples' words."""
    return Tokenizer(train_tokenizer([" ".join(WORDS) + ' ? , . " _ 0123456789'] * 3, "bert", 200, "vocab_size"))


def sentence(number: int, length: int) -> str:
    """Words drawn by a fixed rule, different for every number."""
    return " ".join(
        WORDS[(number * 7 + place * (number % 5 + 3) + number // 11) % len(WORDS)] for place in range(length)
    )


def write_task(folder: Path, name: str, count: int, first: int = 0) -> Path:
    """A file in the official layout with `count` labelled examples that can be learned by heart."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(first, first + count)
    if name == "mnli":
        header = "index promptID pairID genre s1b s2b s1p s2p sentence1 sentence2 label1 gold_label".split()
        rows = [[str(n), *"x" * 7, sentence(n, 4 + n % 5), sentence(n + 50, 3 + n % 4), "x"] for n in numbers]
        labels = [("entailment", "neutral", "contradiction")[n * 7 % 11 % 3] for n in numbers]
        return _write_tsv(
            folder / f"mnli_{first}.tsv", header, [[*r, label] for r, label in zip(rows, labels, strict=True)]
        )
    if name == "qqp":
        header = "id qid1 qid2 question1 question2 is_duplicate".split()
        rows = [[str(n), "0", "0", sentence(n, 4 + n % 6), sentence(n + 50, 5), str(n * 7 % 11 % 2)] for n in numbers]
        return _write_tsv(folder / f"qqp_{first}.tsv", header, rows)
    if name == "sst2":
        rows = [[sentence(n, 4 + n % 6), str(n * 7 % 11 % 2)] for n in numbers]
        return _write_tsv(folder / f"sst2_{first}.tsv", ["sentence", "label"], rows)
    if name == "stsb":
        rows = [[str(n), sentence(n, 4), sentence(n + n % 3, 4), str(5 - n % 3 * 2.5)] for n in numbers]
        return _write_tsv(folder / f"stsb_{first}.tsv", "index sentence1 sentence2 score".split(), rows)
    if name == "race":
        path = folder / f"race_{first}.jsonl"
        path.write_text("".join(json.dumps(_passage(n)) + "\n" for n in numbers), encoding="utf-8")
        return path
    path = folder / f"{name}_{first}.json"
    path.write_text(json.dumps(squad_json(name, count, first)), encoding="utf-8")
    return path


def _passage(n: int) -> dict:
    options = [sentence(n * 4 + i, 2) for i in range(4)]
    article = sentence(n, 12 + n % 20)
    return {
        "id": f"{('middle', 'high')[n % 2]}{n}.txt",
        "article": article,
        "questions": [f"the _ {sentence(n + 9, 2)} ?"],
        "options": [options],
        "answers": ["ABCD"[n * 7 % 11 % 4]],
    }


def squad_json(name: str, count: int, first: int = 0) -> dict:
    """Questions on contexts of 10 to 59 words; in 2.0 every third has no answer."""
    paragraphs = []
    for n in range(first, first + count):
        words = sentence(n, 10 + n * 13 % 50).split()
        place = n * 7 % (len(words) - 2)
        text = " ".join(words[place : place + 1 + n % 2])
        answers = [{"text": text, "answer_start": len(" ".join([*words[:place], ""]))}]
        qa = {"id": f"q{n}", "question": sentence(n + 31, 4) + " ?", "answers": answers}
        if name == "squad_v2":
            qa["is_impossible"] = n % 3 == 0
            qa["answers"] = [] if n % 3 == 0 else answers
        paragraphs.append({"context": " ".join(words), "qas": [qa]})
    return {
        "version": {"squad_v1": "1.1", "squad_v2": "v2.0"}[name],
        "data": [{"title": "t", "paragraphs": paragraphs}],
    }


def _write_tsv(path: Path, header: list[str], rows: list[list[str]]) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]), encoding="utf-8")
    return path
