"""Published finetuning data in the forms that `finetune/run.py` reads, divided where no other set could be had."""

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

from lmscale.config.finetune import GLUE

RECORDS = Path(__file__).parent / "records"
RACE_TRAIN_STRIDE, RACE_DEV_STRIDE, SQUAD_DEV_STRIDE = 50, 4, 5
PLACES = {"mnli": "mnli", "qqp": "qqp"} | {task: f"glue/{GLUE[task]}" for task in GLUE if task not in ("mnli", "qqp")}


def open_text(path: Path) -> Any:
    """A text file, unpacked."""
    return (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8")


def prepare_inputs(data: Path, folder: Path, shuffle: bool = False) -> None:
    """Write the parts of RACE and SQuAD that are used, and link GLUE's files under their published names.

    Args:
        shuffle: the passages of RACE and the paragraphs of SQuAD that are trained on (seed 0), because a finetuning
            that is limited takes the first ones.

    Raises:
        ValueError: the data sets are missing.
    """
    if not data.is_dir():
        raise ValueError(f"the data sets must be in $LMSCALE_DATA, but {data} does not exist")
    shutil.rmtree(folder / "glue", ignore_errors=True)
    for task, place in PLACES.items():
        (folder / "glue" / GLUE[task]).mkdir(parents=True)
        for source in (data / place).glob("*.shared.tsv*"):
            target = source.name.replace(".shared", "").replace("with_ids", "dev")  # QQP's scored set
            (folder / "glue" / GLUE[task] / target).symlink_to(source)
    cut_race(data, folder, shuffle)
    for task in ("squad_v1", "squad_v2"):
        cut_squad(data, folder, task, shuffle)


def sets_of(task: str, folder: Path) -> tuple[str, ...]:
    """Keys of a finetuning with a task's sets, after `prepare_inputs`."""
    if task in PLACES:
        return (f"task.path={folder / 'glue'}",)
    ending = "jsonl" if task == "race" else "json"
    parts = {"train": "train", "validation.dev": "dev"}
    return tuple(f"task.{key}={folder / f'{task}_{part}.{ending}'}" for key, part in parts.items())


def cut_squad(source: Path, folder: Path, task: str, shuffle: bool) -> None:
    """Split a file into articles for training and for scoring, in the official format."""
    file = source / "squad" / f"dev-{ {'squad_v1': 'v1.1', 'squad_v2': 'v2.0'}[task] }.shared.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    train, dev = list(content["data"]), content["data"][SQUAD_DEV_STRIDE - 1 :: SQUAD_DEV_STRIDE]
    del train[SQUAD_DEV_STRIDE - 1 :: SQUAD_DEV_STRIDE]
    if shuffle:
        parts = [{"title": each["title"], "paragraphs": [p]} for each in train for p in each["paragraphs"]]
        train = random.Random(0).sample(parts, len(parts))
    for name, articles in (("train", train), ("dev", dev)):
        text = json.dumps({"version": content["version"], "data": articles}, ensure_ascii=False)
        (folder / f"{task}_{name}.json").write_text(text, encoding="utf-8")


def cut_race(source: Path, folder: Path, shuffle: bool) -> None:
    """Select passages for training and for scoring, as JSON lines."""
    leakage = json.loads((RECORDS / "race_leakage.json").read_text(encoding="utf-8"))
    leaked = {pair["train"] for pair in leakage["config"]["pairs"]}
    for name, stride, left_out in (("train", RACE_TRAIN_STRIDE, leaked), ("dev", RACE_DEV_STRIDE, set())):
        with open_text(source / f"race/race_{name}.jsonl.gz") as file:
            lines = [line for number, line in enumerate(file) if number % stride == 0]
        kept = [line for line in lines if json.loads(line)["id"] not in left_out]
        if shuffle and name == "train":
            kept = random.Random(0).sample(kept, len(kept))
        (folder / f"race_{name}.jsonl").write_text("".join(kept), encoding="utf-8")
