"""The whole paper in miniature: prepare a corpus, pretrain, evaluate, finetune and distil, whatever has no record yet.

    python analysis/miniature/run.py                  # all of it, two cells at a time; see plan.md for the hours
    python analysis/miniature/run.py --list           # what is left, and how long it takes
    python analysis/miniature/run.py --only ID ...    # repeat cells and compare

The texts are those of $LMSCALE_DATA or ../shared/data. A cell is one command on one thread; its record is a line of the
file `--records`. The study may be stopped at any time: a pretraining goes on from its newest checkpoint, and a folder
that a later cell needs and that is gone is made again.
"""

import argparse
import csv
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import yaml

from analysis import running
from analysis.finetuning.inputs import open_text, prepare_inputs, sets_of
from analysis.report.records import add_line, read_lines
from lmscale.cli.errors import one_line_errors
from lmscale.results import METRICS, RECORD, existing_path, new_record, path_argument, read_record, record_argument

HERE = Path(__file__).parent
RECORDS, CELLS = HERE / "records" / "miniature.jsonl", HERE / "cells.yaml"
LAMBADA, WIKITEXT = "lambada/lambada_test.shared.jsonl", "wikitext/wikitext-103.wiki.valid.tokens"
KEPT = ("model", "optimizer", "schedule", "trainer", "global_batch_size", "teacher", "task", "ckpt", "sets", "data")
MANIFEST = "manifest.json"  # of a corpus
FOLDER_KEYS = {"src/prepare_data.py": "output=", "finetune/ensemble.py": "--out="}
TOLERANCE = {"nats": 0.02, "%": 3.0}  # within which a repeated cell agrees, by the first word of the unit


@dataclass(frozen=True)
class Cell:
    """One command.

    Args:
        name: ID of its record, and its run folder below `--outputs`.
        words: the script and its keys, without the folder's.
        needs: cells whose folders it reads.
    """

    name: str
    words: tuple[str, ...]
    needs: tuple["Cell", ...] = ()


class Study:
    """The cells of a plan.

    Args:
        plan: content of `cells.yaml`.
        known: records by ID.
    """

    def __init__(self, plan: dict[str, Any], outputs: Path, data: Path, known: dict[str, Any]) -> None:
        self.plan, self.outputs, self.data, self.known = plan, outputs, data, known
        self.inputs = outputs / "inputs"
        self.corpora = {family: self._corpus(family) for family in ("gpt", "bert")}

    def stages(self) -> Iterator[list[list[Cell]]]:
        """Chains of cells; those of a stage follow from the records of the ones before."""
        arms, widths, rates = (self.plan[key] for key in ("arms", "widths", "rates"))
        yield [[cell] for cell in self.corpora.values()]
        first, tried = next(iter(widths)), [(arm, rate) for arm in arms for rate in rates[arm]]
        yield [[self._pretrain(f"rate/{arm}/{rate}", arm, first, rates["seed"], rate)] for arm, rate in tried]
        models = [(arm, width, seed) for width in widths for arm in arms for seed in widths[width]]
        yield [chain for model in models for chain in self.chains(*model)]

    def cells(self) -> list[Cell]:
        """All cells, in order."""
        return [*itertools.chain(*itertools.chain(*self.stages()))]

    def best_rate(self, arm: str) -> float | None:
        """The rate with the lowest validation loss; None as long as one has no record."""
        known = {rate: self.known.get(f"rate/{arm}/{rate}") for rate in self.plan["rates"][arm]}
        return None if None in known.values() else min(known, key=lambda rate: loss_of(known[rate]))

    def chains(self, arm: str, width: int, seed: int) -> Iterator[list[Cell]]:
        """A pretraining and what is derived from it; for the first widths of GPT also the distillation."""
        plan, rate, (first, second, *_) = self.plan, self.best_rate(arm), self.plan["widths"]
        model = self._pretrain(f"pretrain/{arm}/{width}/{seed}", arm, width, seed, rate)
        if arm.startswith("bert"):
            yield [model, *self._evaluate(model, "bert"), *self._finetune(model, arm, width, seed)]
            return
        chain = [model, *self._evaluate(model, "gpt")]
        if width == second:
            words = [f"{key}={value}" for key, value in plan["distilled"].items()]
            words.append(f"teacher.path={self.outputs / model.name}")
            name = f"pretrain/gpt_distilled/{first}/{seed}"
            student = self._pretrain(name, arm, first, seed, rate, words, (model,))
            chain += [student, *self._evaluate(student, "gpt")]
        yield chain
        if width == first:
            words = [f"trainer.max_steps={plan['long_steps']}"]
            long = self._pretrain(f"pretrain/gpt_long/{first}/{seed}", arm, first, seed, rate, words)
            yield [long, *self._evaluate(long, "gpt")]

    def _corpus(self, family: str) -> Cell:
        words = (
            *("src/prepare_data.py", f"architecture={family}", *self.plan["prepare"]),
            *(f"sources.local.path={self.data / 'race/race_train.jsonl.gz'}", "sources.local.text_field=article"),
            f"+sources.running={{kind: local, path: '{self.data / 'running-text/docs.shared.jsonl.gz'}'}}",
            *("evaluation=none", f"+evaluation_sets.wikitext103={{form: wikitext, path: '{self.data / WIKITEXT}'}}"),
            f"+evaluation_sets.others={{form: records, path: '{self.inputs / 'evaluation.jsonl'}'}}",
            "launcher.workers=1",
        )
        return Cell(f"corpus/{family}", words)

    def _pretrain(
        self, name: str, arm: str, width: int, seed: int, rate: float | None, more: Sequence[str] = (), needs: Any = ()
    ) -> Cell:
        corpus = self.corpora[arm.partition("_")[0]]
        keys = (f"model.hidden_size={width}", f"seed={seed}", f"optimizer.lr={rate}", *self.plan["train"], *more)
        words = ("src/train.py", *self.plan["arms"][arm], f"data.path={self.outputs / corpus.name}", *keys)
        return Cell(name, words, (corpus, *needs))

    def _evaluate(self, model: Cell, family: str) -> list[Cell]:
        paths = {"blimp": self.inputs / "blimp", "lambada": self.data / LAMBADA, "wikitext103": self.data / WIKITEXT}
        cells = []
        for task, more in self.plan["zero_shot"][family].items():
            keys = (f"task={task}", f"task.path={paths[task]}", f"ckpt={self.outputs / model.name}", *more)
            cells.append(Cell(model.name.replace("pretrain", task), ("src/zero_shot.py", *keys), (model,)))
        return cells

    def _finetune(self, model: Cell, arm: str, width: int, seed: int) -> list[Cell]:
        """The pretraining with its own seed, or with all seeds if it is the only one of its width."""
        seeds = [seed] if len(self.plan["widths"][width]) > 1 else self.plan["seeds"]
        kinds = [(arm, (), self.plan["primary"])]
        if arm == "bert_pre":
            kinds += [("random", ("from_scratch=true",), self.plan["primary"]), (arm, (), self.plan["described"])]
        keys, cells = [f"ckpt={self.outputs / model.name}", f"cache_dir={self.outputs / 'cache'}"], []
        for kind, words, tasks in kinds:
            for (task, more), number in itertools.product(tasks.items(), seeds):
                own = (f"task={task}", f"seed={number}", *sets_of(task, self.inputs), *words, *more)
                every = ("finetune/run.py", *keys, *self.plan["finetune"], *own)
                cells.append(Cell(f"{task}/{kind}/{width}/{number}", every, (model,)))
        if arm == "bert_pre" and width == list(self.plan["widths"])[-1]:
            for task in self.plan["ensembles"]:
                needs = tuple(cell for cell in cells if cell.name.startswith(f"{task}/{arm}/"))
                words = [str(self.outputs / member.name) for member in needs]
                cells.append(Cell(f"ensemble/{task}/{width}", ("finetune/ensemble.py", *words), needs))
        return cells


def prepare_texts(folder: Path, data: Path, blimp_pairs: int) -> None:
    """Write what the cells read besides the published files, and the texts that the corpus must not contain.

    Raises:
        ValueError: a text is missing.
    """
    prepare_inputs(data, folder, shuffle=True)
    qqp = folder / "glue/QQP/train.tsv"
    scored = {tuple(line.split("\t")[3:5]) for line in open_text(qqp.with_name("dev.tsv"))}
    header, *rows = open_text(qqp)
    qqp.unlink()  # a link
    qqp.write_text("".join([header, *(row for row in rows if tuple(row.split("\t")[3:5]) not in scored)]), "utf-8")
    shutil.rmtree(folder / "blimp", ignore_errors=True)
    (folder / "blimp").mkdir()
    texts = [
        field for file in sorted(folder.glob("glue/*/dev*")) for line in open_text(file) for field in line.split("\t")
    ]
    for source in sorted((data / "blimp/pairs").glob("*.jsonl.gz")):
        lines = list(itertools.islice(open_text(source), blimp_pairs))
        (folder / "blimp" / source.stem).write_text("".join(lines), encoding="utf-8")
        texts += [json.loads(line)[name] for line in lines for name in ("sentence_good", "sentence_bad")]
    for task in ("squad_v1", "squad_v2"):
        articles = json.loads((folder / f"{task}_dev.json").read_text(encoding="utf-8"))["data"]
        texts += [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
    for path, field in ((data / LAMBADA, "text"), (data / "race/race_dev.jsonl.gz", "article")):
        texts += [json.loads(line)[field] for line in open_text(path)]
    lines = (json.dumps({"text": text}) + "\n" for text in texts if text.count(" ") >= 7)  # an n-gram has 8 words
    (folder / "evaluation.jsonl").write_text("".join(lines), encoding="utf-8")


def loss_of(record: dict[str, Any]) -> float:
    """Validation loss of a pretraining, of BERT that of the masked tokens; inf if it diverged."""
    metrics = record["metrics"]
    value = metrics.get("val/lm_loss", metrics["val/loss"])["value"]
    return float("inf") if value is None else value


def describe(cell: Cell, folder: Path, cpu_time: float | None) -> dict[str, Any]:
    """What the study keeps of a cell's record; of a pretraining also its validation losses by step."""
    script = cell.words[0]
    if script == "src/prepare_data.py":
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sources, names = manifest["sources"].items(), ("train", "validation")
        parts = {f"{source}/{part}": each[part] for source, each in sources for part in names}
        metrics = {f"{name}/tokens": {"value": each["tokens"], "unit": "tokens"} for name, each in parts.items()}
        config = {"sha256": {name: each["sha256"] for name, each in parts.items()}, "reports": manifest["reports"]}
        record = new_record(cell.name, "scaled_down", config | {"tokenizer": manifest["tokenizer"]}, None, metrics)
    else:
        record = read_record(folder / RECORD)
        record["config"] = {key: value for key, value in record["config"].items() if key in KEPT}
    if script == "src/train.py":
        with open(folder / METRICS, encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        name = "val/lm_loss" if "val/lm_loss" in rows[0] else "val/loss"
        record["config"]["curve"] = {row["step"]: float(row[name]) for row in rows if row[name]}
    if cpu_time is not None:
        record["metrics"]["cpu_time"] = {"value": cpu_time, "unit": "s"}
    return record | {"name": cell.name, "kind": "scaled_down"}


def make(cell: Cell, outputs: Path) -> float | None:
    """Run a cell that is not complete, after those that it needs.

    Returns:
        CPU time in seconds; None if it was complete.
    """
    folder = outputs / cell.name
    if (folder / RECORD).is_file() or (folder / MANIFEST).is_file():
        return None
    for need in cell.needs:
        make(need, outputs)
    if cell.words[0] != "src/train.py":  # which goes on from its newest checkpoint
        shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"--- {cell.name}\n", end="", flush=True)  # one write, because several threads print
    key = FOLDER_KEYS.get(cell.words[0], "hydra.run.dir=")
    _, usage = running.run_cell([*cell.words, f"{key}{folder}"], folder.with_name(f"{folder.name}.log"))
    return usage.ru_utime + usage.ru_stime


def compare(name: str, found: dict[str, Any], known: dict[str, Any]) -> bool:
    """Print the largest differences of a repeated cell from its record; whether they are within `TOLERANCE`."""
    agrees = True
    for unit, most in TOLERANCE.items():
        pairs = [
            (abs(found["metrics"][key]["value"] - entry["value"]), key)
            for key, entry in known["metrics"].items()
            if entry["unit"].partition("/")[0] == unit and "/" in key and entry["value"] is not None
        ]
        if pairs:
            difference, key = max(pairs)
            agrees &= difference <= most
            print(f"{name}: {key} differs by {difference:.3g} {unit}, of at most {most:g}", flush=True)
    return agrees


def print_left(study: Study) -> None:
    """Print every cell, whether it has a record, and how long the others take."""
    minutes, left = study.plan["minutes"], 0.0
    for cell in study.cells():
        kind, arm, *width = cell.name.split("/")
        by_width = minutes.get(f"{kind}/{arm}", minutes.get(kind))
        expected = by_width[int(width[0])] if isinstance(by_width, dict) else by_width
        left += expected * (cell.name not in study.known)
        print(f"{cell.name:<40}{'done' if cell.name in study.known else f'{expected:g} min'}")
    print(f"left: {left / 60:.1f} hours of one CPU thread")


@one_line_errors()
def main() -> int:
    """List, run or repeat cells."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the cells and run nothing")
    parser.add_argument("--jobs", type=running.positive, default=2, help="number of concurrent cells, one thread each")
    parser.add_argument("--only", nargs="+", metavar="ID", help="repeat these cells and compare")
    parser.add_argument("--cells", type=existing_path, default=CELLS, help="another plan, with other --records")
    default = running.ROOT / "outputs" / "miniature"
    parser.add_argument("--outputs", type=path_argument, default=default, help="run folders")
    parser.add_argument("--records", type=record_argument, default=RECORDS, help="file of the cells' records")
    options = parser.parse_args()
    if options.cells != CELLS and options.records == RECORDS:
        parser.error("--records must be another file with --cells: the cells then differ from the study's")
    plan = yaml.safe_load(options.cells.read_text(encoding="utf-8"))
    data = Path(os.environ.get("LMSCALE_DATA", running.ROOT.parent / "shared" / "data")).resolve()
    outputs, known = options.outputs.resolve() / ("repeated" if options.only else ""), read_lines(options.records)
    study = Study(plan, outputs, data, known)
    if options.list:
        print_left(study)
        return 0
    prepare_texts(study.inputs, data, plan["blimp_pairs"])
    if options.only:
        cells = {cell.name: cell for cell in study.cells()}
        if unknown := set(options.only) - (cells.keys() & known.keys()):
            raise ValueError(f"`--only` must name cells with a record, but is {min(unknown)}; see --list")
        again = {name: describe(cells[name], outputs / name, make(cells[name], outputs)) for name in options.only}
        return int(not all([compare(name, record, known[name]) for name, record in again.items()]))

    def run(cell: Cell) -> None:
        is_corpus = cell in study.corpora.values()  # all others need it
        if cell.name in known and not is_corpus:
            return
        cpu_time = make(cell, outputs)
        record = describe(cell, outputs / cell.name, cpu_time)
        if cell.name not in known:
            add_line(options.records, cell.name, record)
            known[cell.name] = record
        elif record["config"] != known[cell.name]["config"]:
            raise ValueError(f"{cell.name} must be that of {options.records}, but its texts differ")

    for chains in study.stages():
        running.run_chains(chains, run, options.jobs)
    print(f"records: {options.records}; python analysis/miniature/decide.py --records {options.records} evaluates them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
