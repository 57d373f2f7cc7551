"""The miniature of the paper: its commands at toy size, interrupted and repeated, and its tests on planted numbers."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import warm
import yaml
from entry_points import environment
from scipy import stats

from analysis import running
from analysis.ledger.entries import ENTRIES
from analysis.miniature import decide, figure, run
from analysis.report.records import add_line, read_lines
from lmscale.config import TransformerConfig

WORDS = [
    f"{a}{b}" for a in ("ba", "de", "ki", "lo", "mu", "pra", "so", "ti") for b in ("n", "r", "st", "ll", "ng", "m")
]
TOY = {
    "widths": {96: [1], 192: [1]},
    "seeds": [1],
    "prepare": ["tokenizer.vocab_size=300", "cleaning=none", "validation_every=3"],
    "train": ["experiment=miniature", "trainer.max_steps=2", "trainer.validate_every_steps=1", "data.seq_length=32"]
    + ["micro_batch_size=2", "global_batch_size=2", "trainer.num_validation_samples=2", "schedule.warmup_steps=1"]
    + ["checkpoint.save_every_steps=1", "trainer.accelerator=cpu"],
    "arms": {"gpt_pre": ["model=gpt_tiny"], "bert_pre": ["model=bert_tiny"]},
    "rates": {"seed": 9, "gpt_pre": [0.001], "bert_pre": [0.001]},
    "distilled": {"teacher.temperature": 2},
    "long_steps": 3,
    "zero_shot": {"gpt": {"lambada": ["task.truncate_left=true"]}, "bert": {"blimp": []}},
    "blimp_pairs": 1,
    "finetune": ["trainer.max_train_examples=2", "trainer.num_epochs=1", "task.max_seq_length=64"],
    "primary": {"sst2": []},
    "described": {"race": ["task.max_qa_length=16"]},
    "ensembles": [],
    "minutes": {"corpus": 1, "rate": 1, "pretrain": {96: 1, 192: 2}, "lambada": 1, "blimp": 1, "sst2": 1, "race": 1},
}


def texts(seed: int, number: int, length: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=length)) + "." for _ in range(number)]


def lines(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (gzip.open if path.suffix == ".gz" else open)(path, "wt").write("".join(f"{row}\n" for row in rows))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """All texts that the study reads, in their published forms, of made-up words."""
    folder = tmp_path_factory.mktemp("data")
    for part, seed, number in (("train", 1, 60), ("dev", 2, 8)):
        rows = [
            {"split": part, "level": "middle", "file": f"{n}.txt", "id": f"middle{n}.txt", "article": article}
            | {"questions": ["ba _ de?"], "options": [["ba", "de", "ki", "lo"]], "answers": ["A"]}
            for n, article in enumerate(texts(seed, number, 150))
        ]
        lines(folder / f"race/race_{part}.jsonl.gz", [json.dumps(row) for row in rows])
    rows = [json.dumps({"text": text, "source": "x", "id": str(n)}) for n, text in enumerate(texts(3, 40, 150))]
    lines(folder / "running-text/docs.shared.jsonl.gz", rows)
    lines(folder / run.LAMBADA, [json.dumps({"text": text.rstrip(".")}) for text in texts(4, 3, 20)])
    lines(folder / run.WIKITEXT, [" = Title = ", " ", *(f" {text[:-1]} . " for text in texts(5, 3, 30))])
    pair = {"field": "syntax", "linguistics_term": "island_effects", "UID": "toy"}
    pairs = [{"sentence_good": a, "sentence_bad": b, "pairID": str(n)} for n, (a, b) in enumerate([("ban", "der")] * 2)]
    lines(folder / "blimp/pairs/toy.jsonl.gz", [json.dumps(pair | each) for each in pairs])
    sst2 = ["sentence\tlabel", *(f"{text}\t{n % 2}" for n, text in enumerate(texts(6, 6, 9)))]
    lines(folder / "glue/SST-2/dev.shared.tsv", sst2)
    lines(folder / "glue/SST-2/train.shared.tsv.gz", sst2)
    qqp = [f"{n}\t0\t0\t{text}\tban?\t{n % 2}" for n, text in enumerate(texts(8, 4, 9))]
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    lines(folder / "qqp/train.shared.tsv", [header, *qqp])
    lines(folder / "qqp/with_ids.shared.tsv", [header, *qqp[:1]])
    for version in ("v1.1", "v2.0"):
        article = {"title": "t", "paragraphs": [{"context": texts(7, 1, 30)[0], "qas": []}]}
        lines(folder / f"squad/dev-{version}.shared.json", [json.dumps({"version": version, "data": [article] * 5})])
    return folder


def toy(folder: Path, **changes) -> list[str]:
    """Words of a run at toy size."""
    (folder / "cells.yaml").write_text(yaml.safe_dump(TOY | changes, sort_keys=False), encoding="utf-8")
    paths = {"--cells": "cells.yaml", "--outputs": "outputs", "--records": "records.jsonl"}
    return ["analysis/miniature/run.py", *(word for key, name in paths.items() for word in (key, str(folder / name)))]


def numbers(folder: Path) -> dict[str, dict[str, float]]:
    """The metrics of all records, but for times."""
    records = read_lines(folder / "records.jsonl")
    return {
        name: {
            key: entry["value"]
            for key, entry in record["metrics"].items()
            if entry["unit"] not in ("s", "items/s", "tokens/s")
        }
        for name, record in records.items()
    }


def warm_cell(arguments: list[str], log: Path, codes: tuple[int, ...] = (0,)) -> tuple[int, SimpleNamespace]:
    done = warm.run([str(running.ROOT / arguments[0]), *arguments[1:]], running.ROOT, environment(), timeout=300)
    if done.returncode not in codes:
        raise ValueError(f"{log.stem} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return 0, SimpleNamespace(ru_utime=1.0, ru_stime=0.0)


def test_every_kind_of_cell_runs_at_toy_size_and_goes_on_where_it_stopped(data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("LMSCALE_DATA", str(data))
    calls = []

    def failing(arguments: list[str], log: Path, codes: tuple[int, ...] = (0,)) -> tuple[int, SimpleNamespace]:
        calls.append(arguments)
        if len(calls) == 9:
            raise ValueError("the disk is full")
        return warm_cell(arguments, log, codes)

    monkeypatch.setattr(running, "run_cell", failing)
    words = toy(tmp_path)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        run.main()
    for _ in range(2):
        before = len(calls)
        assert run.main() == 0
    assert len(calls) == before  # nothing is left
    known = read_lines(tmp_path / "records.jsonl")
    assert [*known] == [*dict.fromkeys(known)] and len(calls) == len(known) + 1
    assert {name.split("/")[0] for name in known} == {"corpus", "rate", "pretrain", "lambada", "blimp", "sst2", "race"}
    monkeypatch.setattr(sys, "argv", [*words, "--list"])
    assert run.main() == 0 and capsys.readouterr().out.endswith("left: 0.0 hours of one CPU thread\n")
    train = (tmp_path / "outputs/inputs/glue/QQP/train.tsv").read_text().splitlines()
    assert [row.split("\t")[0] for row in train] == ["id", "1", "2", "3"]  # without the row that is scored
    cells = decide.models(known).set_index(["arm", "width"])
    assert cells.loc[("gpt_distilled", 96), "flops"].item() > cells.loc[("gpt_pre", 96), "flops"].item()
    assert set(decide.finetunings(known)["arm"]) == {"bert_pre", "random"}
    monkeypatch.setattr(sys, "argv", [*words, "--only", "pretrain/gpt_distilled/96/1"])
    assert run.main() == 0 and "differs by 0 nats" in capsys.readouterr().out


def test_a_larger_model_is_better_only_where_all_neighbours_are() -> None:
    widths = pd.Series([96] * 3 + [192] * 3 + [320])
    rising = decide.order(pd.Series([1.0, 1.1, 0.9, 2.0, 2.1, 1.9, 3.0]), widths)
    # Both rises are 1; the second, of one value, has the larger error 0.1 sqrt(1 + 1/3), at 4 degrees of freedom.
    assert rising["effect"] == pytest.approx(1.0) and rising["freedom"] == 4
    assert rising["spread"] == pytest.approx(0.1) and rising["p"] == pytest.approx(stats.t.sf(10 / (4 / 3) ** 0.5, 4))
    falling = decide.order(pd.Series([1.0, 1.1, 0.9, 2.0, 2.1, 1.9, 1.9]), widths)
    assert falling["effect"] == pytest.approx(-0.1) and falling["p"] > 0.5


def test_the_test_of_a_teacher_is_paired_by_seed() -> None:
    rows = [("gpt_pre", s, 3.0 + 0.3 * s) for s in (1, 2, 3)] + [
        ("gpt_distilled", s, 2.9 + 0.31 * s) for s in (1, 2, 3)
    ]
    losses = pd.DataFrame(rows, columns=["arm", "seed", "loss"]).assign(width=96)
    found = decide.paired(losses, "gpt_distilled", "gpt_pre", "less")
    assert found["effect"] == pytest.approx(-0.08) and found["spread"] == pytest.approx(0.01) and found["p"] < 0.005
    assert decide.paired(losses, "gpt_pre", "gpt_distilled", "less")["p"] > 0.99


def test_finetunings_of_one_pretraining_are_one_observation() -> None:
    rows = [("sst2", "bert_pre", 320, 1, seed, 60.0 + seed) for seed in (1, 2, 3)] + [
        ("sst2", "bert_pre", 96, 2, 2, 55.0)
    ]
    found = decide.by_model(pd.DataFrame(rows, columns=["task", "arm", "width", "model", "seed", "score"]), ["sst2"])
    assert found[["width", "model", "score"]].values.tolist() == [[96, 2, 55.0], [320, 1, 62.0]]


METRICS = {
    "mnli": ("accuracy", "accuracy_matched", "accuracy_mismatched"),
    "race": ("accuracy", "accuracy_middle", "accuracy_high"),
    **dict.fromkeys(("squad_v1", "squad_v2"), ("f1", "exact_match")),
    **{"cola": ("matthews",), "stsb": ("pearson", "spearman")},
}
LAYERS = {96: 2, 192: 3, 320: 6}


def planted_record(name: str) -> dict:
    """A larger model is better in everything but SST-2, and a teacher helps at equal tokens alone."""
    kind, arm, *place = name.split("/")
    width, seed = (int(place[0]), int(place[1])) if len(place) == 2 else (320, 1)
    noise = 0.01 * random.Random(name).uniform(-1, 1)
    better = {96: 0.0, 192: 1.0, 320: 2.0}[width]
    values, config = {"cpu_time": (36.0, "s")}, {}
    if kind in ("rate", "pretrain"):
        family = arm.partition("_")[0]
        lower = {"gpt_distilled": 0.2, "gpt_long": 0.2}.get(arm, 0.0)
        loss = 5.0 - 0.5 * better - lower + noise
        model = TransformerConfig(family, LAYERS[width], width, width // 32, 4096, 128)
        path = "x" if arm == "gpt_distilled" else None
        config = {"model": model.to_dict(), "global_batch_size": 32, "teacher": {"path": path}, "curve": {"9": loss}}
        values |= {"val/lm_loss" if family == "bert" else "val/loss": (loss, "nats/token"), "steps": (1000, "steps")}
        values |= {"val/loss": (loss + 0.7, "nats/token")} if family == "bert" else {}
    elif kind in ("lambada", "wikitext103", "blimp"):
        values |= {"lambada_openai/perplexity_last_word": (1e4 - better, "exp(nats/word)")}
        values |= {"lambada_openai/accuracy_last_word": (better, "%"), "wikitext103/perplexity": (900 - better, "x")}
        values |= {"blimp/accuracy": (55 + 3 * better + noise, "%")}
    elif kind != "corpus":
        task = arm if kind == "ensemble" else kind
        score = 60 + (0 if task == "sst2" else 4) * better + 50 * noise
        values |= {f"{task}/{metric}": (score, "%") for metric in METRICS.get(task, ("accuracy",))}
        if kind != "ensemble":
            metrics = [METRICS.get(task, ("accuracy",))[0]]
            ckpt = f"outputs/{arm}/{width}/{1 if width == 320 else seed}"
            sets = {"train": {"examples": 9}, "dev": {"examples": 400}}
            config = {"task": {"name": task, "metrics": metrics}, "ckpt": ckpt, "sets": sets}
    return {"config": config, "metrics": {k: {"value": v, "unit": unit} for k, (v, unit) in values.items()}}


def test_a_whole_study_is_decided_and_has_every_counterpart_of_the_ledger(tmp_path, monkeypatch, capsys) -> None:
    plan, path = yaml.safe_load(run.CELLS.read_text(encoding="utf-8")), tmp_path / "miniature.jsonl"
    cells = run.Study(plan, Path(), Path(), {}).cells()
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        add_line(path, cell.name, planted_record(cell.name))
    monkeypatch.setattr(sys, "argv", ["decide.py", "--records", str(path)])
    assert decide.main() == 0
    lines_of_tests = [line for line in capsys.readouterr().out.splitlines() if line.startswith("test ")]
    supported = [": supported" in line for line in lines_of_tests]
    assert supported == [True, True, True, True, True, True, False, True, False], lines_of_tests
    summary = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    wanted = [e.source["metric"] for e in ENTRIES if e.source.get("record") == "miniature.json"]
    assert len(wanted) == 39 and set(wanted) <= summary["metrics"].keys()
    assert summary["metrics"]["cpu_time"]["value"] == pytest.approx(len(cells) / 100)
    assert "of 14 pretrainings" in summary["metrics"]["association"]["unit"]
    known = read_lines(path)
    scores = decide.score_table(decide.finetunings(known))
    assert scores.loc[("qnli", "bert_pre"), [96, 320]].tolist() == pytest.approx([60, 68], abs=0.5)
    assert scores.loc[("qnli", "random"), ["scored", "one class", "standard error"]].tolist() == [400, 50.5, 2.5]
    assert scores.loc[("stsb", "bert_pre"), "standard error"] == 5
    rows = decide.overview(known).set_index(["model", "hidden size"])
    assert len(rows) == 3 + 1 + 1 + 3 * 3 and rows.loc[("GPT", 96), "loss, nats"] == pytest.approx(5.0, abs=0.01)
    assert rows.loc[("BERT, random weights", 320), ["pretrainings", "QNLI, %"]].tolist() == pytest.approx(
        [0, 68], abs=0.5
    )
    drawn = {name: [axis.get_title() for axis in each.axes] for name, (_, each) in figure.study_figures(known).items()}
    panels = {"losses": 2, "zero_shot": 3, "bert": 2, "downstream": 3, "teacher": 1, "association": 1}
    assert {name: len(titles) for name, titles in drawn.items()} == panels and drawn["losses"] == ["BERT", "GPT"]


@pytest.mark.slow
def test_the_study_ends_with_the_same_records_after_a_kill_a_sigterm_and_a_full_disk(data, tmp_path) -> None:
    variables = environment(LMSCALE_DATA=str(data))
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    command = [sys.executable, *toy(tmp_path / "whole"), "--jobs", "2"]
    subprocess.run(command, cwd=running.ROOT, env=variables, check=True, timeout=1200)
    command = [sys.executable, *toy(tmp_path / "stopped"), "--jobs", "2"]
    for number, cells in ((signal.SIGKILL, 3), (signal.SIGTERM, 7)):
        process = subprocess.Popen(command, cwd=running.ROOT, env=variables, start_new_session=True)
        while len(read_lines(tmp_path / "stopped/records.jsonl")) < cells and process.poll() is None:
            time.sleep(0.1)
        os.kill(process.pid, number)
        assert process.wait() == -number
    # No file may be longer than 64 blocks, as on a full disk.
    full = subprocess.run(["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *command], cwd=running.ROOT, env=variables)
    assert full.returncode == 2
    subprocess.run(command, cwd=running.ROOT, env=variables, check=True, timeout=1200)
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")
