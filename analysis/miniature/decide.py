"""What the miniature of the paper shows: its tables, from the records, and the tests of plan.md.

python analysis/miniature/decide.py                       # the study; writes its summary beside the records
python analysis/miniature/decide.py --records FILE        # a repetition, whose summary is beside its records
"""

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np
import pandas as pd
import yaml
from scipy import stats

from analysis.miniature import run
from analysis.norm_order.hypotheses import LEVEL, holm
from analysis.report.records import ONE_THREAD, read_lines
from lmscale.cli.errors import one_line_errors
from lmscale.config import TransformerConfig
from lmscale.config.finetune import objective_of
from lmscale.planner.flops import model_flops_per_step, teacher_flops
from lmscale.planner.params import count_parameters
from lmscale.results import existing_path, new_record, write_record

PRIMARY = {"MNLI and QQP": ["mnli", "qqp"], "QNLI": ["qnli"], "SST-2": ["sst2"]}
MEASURED = {  # of a GPT or a BERT: task, its metric, and what is shown of it
    "wikitext103": ("wikitext103", "wikitext103/perplexity", float),
    "lambada": ("lambada", "lambada_openai/perplexity_last_word", lambda value: -math.log(value)),
    "lambada_accuracy": ("lambada", "lambada_openai/accuracy_last_word", float),
    "blimp": ("blimp", "blimp/accuracy", float),
}
SHOWN = {
    "loss": "loss, nats",
    "wikitext103": "WikiText-103 perplexity",
    "lambada": "LAMBADA, nats",
    "blimp": "BLiMP, %",
}
SHOWN |= {what: f"{what}, %" for what in PRIMARY}
ARMS = {"gpt_pre": "GPT", "gpt_distilled": "GPT, with a teacher", "gpt_long": "GPT, as many FLOPs as with a teacher"}
ARMS |= {"bert_pre": "BERT, pre-norm", "bert_post": "BERT, post-norm", "random": "BERT, random weights"}
UNITS = {"loss": "nats/token", "wikitext103": "WikiText103 perplexity", "lambada": "nats/word", "flops": "FLOPs"}
MODEL = ["arm", "width"]
# Percent of the scored rows that one answer gets: the most frequent class, no answer in SQuAD 2.0, a guess in RACE.
ONE_CLASS = {"mnli": 35.0, "qqp": 61.3, "qnli": 50.5, "sst2": 53.9, "squad_v2": 52.0, "race": 25.0, "rte": 50.4}
ONE_CLASS |= {"mrpc": 68.6, **dict.fromkeys(("squad_v1", "cola", "stsb"), 0.0)}
CORRELATIONS = ("cola", "stsb")
FINETUNED = ["task", *MODEL, "model", "seed", "scored", "score"]


def models(records: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """One row per scored pretraining.

    Returns:
        arm, width, seed; loss (validation, nats per scored token); parameters, without embeddings; flops of the
        training, a teacher's forward passes included; wikitext103 (perplexity), lambada (mean log-probability of the
        last word, nats), lambada_accuracy and blimp (%), nan where they have no record.
    """
    rows, pretrained = [], [name.split("/") for name in records if name.startswith("pretrain/")]
    widths = sorted({int(width) for _, _, width, _ in pretrained})
    for kind, arm, *place in pretrained:
        record = records["/".join([kind, arm, *place])]
        config, steps = record["config"], record["metrics"]["steps"]["value"]
        model = TransformerConfig.from_dict(config["model"])
        sizes = model.max_position_embeddings, config["global_batch_size"]
        per_step, counts = model_flops_per_step(model, *sizes), count_parameters(model)
        if config["teacher"]["path"] is not None:
            teacher = records[f"pretrain/gpt_pre/{widths[1]}/{place[1]}"]["config"]["model"]
            per_step += teacher_flops([TransformerConfig.from_dict(teacher)], *sizes)
        row = {"arm": arm, "width": int(place[0]), "seed": int(place[1]), "loss": run.loss_of(record)}
        row["parameters"] = counts.total - counts.parts["word embedding"] - counts.parts["position embedding"]
        row["flops"] = steps * per_step
        for column, (task, metric, shown) in MEASURED.items():
            found = records.get("/".join([task, arm, *place]))
            row[column] = math.nan if found is None else shown(found["metrics"][metric]["value"])
        rows.append(row)
    return pd.DataFrame(rows).sort_values([*MODEL, "seed"], ignore_index=True)


def finetunings(records: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """One row per finetuning.

    Returns:
        task, arm (`random`: from random weights), width, model (its seed), seed, scored (rows), score (%).
    """
    rows = []
    for name, record in records.items():
        task, arm, *place = name.split("/")
        if "task" in record["config"]:
            width, seed = map(int, place)
            model = seed if arm == "random" else int(record["config"]["ckpt"].rpartition("/")[2])
            score = record["metrics"][objective_of(record["config"]["task"])]["value"]
            scored = sum(part["examples"] for name, part in record["config"]["sets"].items() if name != "train")
            rows.append(dict(zip(FINETUNED, (task, arm, width, model, seed, scored, score), strict=True)))
    return pd.DataFrame(rows, columns=FINETUNED)


def score_table(scores: pd.DataFrame) -> pd.DataFrame:
    """The mean score (%) of each task and arm by width, beside what the scored rows give and hide.

    Returns:
        further columns: scored (rows), one class (%), and the standard error (points) of one score in these rows, at
        most: of a share half, of a correlation one over the root of their number.
    """
    table = scores.pivot_table(index=["task", "arm"], columns="width", values="score")
    tasks = table.index.get_level_values("task")
    scored = tasks.map(scores.groupby("task")["scored"].first())
    error = np.where(tasks.isin(CORRELATIONS), 100.0, 50.0) / np.sqrt(scored)
    return table.assign(**{"scored": scored, "one class": tasks.map(ONE_CLASS), "standard error": error})


def by_model(scores: pd.DataFrame, tasks: Sequence[str]) -> pd.DataFrame:
    """The mean score in several tasks, one row per pretraining that was finetuned on all."""
    some = scores[scores["task"].isin(tasks)].pivot_table(index=[*MODEL, "model"], columns="task", values="score")
    return some.reindex(columns=tasks).dropna().mean(axis=1).rename("score").reset_index()


def primary_scores(scores: pd.DataFrame) -> pd.DataFrame:
    """The mean score (%) of each pretraining in each group of primary tasks, a column each."""
    of_tasks = {what: by_model(scores, tasks).set_index([*MODEL, "model"])["score"] for what, tasks in PRIMARY.items()}
    return pd.DataFrame(of_tasks).reset_index()


def overview(records: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """A row per arm and width, of means over the pretrainings.

    Returns:
        model, hidden size, pretrainings, and what is measured of them with its unit; nan where nothing is.
    """
    cells, primary = models(records), primary_scores(finetunings(records))
    groups = cells.groupby(MODEL)
    rows = pd.concat([groups.mean()[["loss", *MEASURED]], primary.groupby(MODEL)[[*PRIMARY]].mean()], axis=1)
    rows.insert(0, "pretrainings", groups.size().reindex(rows.index, fill_value=0))
    rows = rows.drop(columns="lambada_accuracy").rename(columns=SHOWN, index=ARMS).loc[[*ARMS.values()]]
    return rows.reset_index(names=["model", "hidden size"])


def order(values: pd.Series, widths: pd.Series) -> dict[str, float]:
    """Whether values rise with the width: the larger p of one-sided t tests between neighbouring widths.

    All widths share one variance, that of the widths with several values.

    Returns:
        `effect`, the smallest rise; its p; `spread`, the standard deviation; `freedom`; `refuted`: one width is below
        the one before, and the last below the first.
    """
    groups = [group for _, group in values.groupby(widths)]
    freedom = sum(len(group) - 1 for group in groups)
    spread = math.sqrt(sum(((group - group.mean()) ** 2).sum() for group in groups) / freedom)
    rises = [(b.mean() - a.mean(), math.sqrt(1 / len(a) + 1 / len(b))) for a, b in itertools.pairwise(groups)]
    p = max(float(stats.t.sf(rise / (spread * scale), freedom)) for rise, scale in rises)
    refuted = min(rise for rise, _ in rises) < 0 and groups[-1].mean() < groups[0].mean()
    found = {"effect": min(rise for rise, _ in rises), "p": p, "spread": spread, "freedom": freedom}
    return found | {"refuted": bool(refuted)}


def paired(losses: pd.DataFrame, first: str, second: str, alternative: str) -> dict[str, float]:
    """A paired t test over seeds of the loss of one arm minus another's, at the first width."""
    by_seed = losses[losses["width"] == losses["width"].min()].pivot(index="seed", columns="arm", values="loss")
    test = stats.ttest_rel(by_seed[first], by_seed[second], alternative=alternative)
    difference = by_seed[first] - by_seed[second]
    found = {"effect": difference.mean(), "p": float(test.pvalue), "spread": difference.std()}
    refuted = alternative == "less" and bool((difference > 0).all())
    return found | {"freedom": len(difference) - 1, "refuted": refuted}


def decide(cells: pd.DataFrame, scores: pd.DataFrame) -> list[dict[str, Any]]:
    """The nine tests of `plan.md`, when all cells have run.

    Returns:
        per test `claim`, `unit`, `effect`, `p`, `spread`, `freedom`, `p_holm`, `supported` and `refuted`.
    """
    gpt, bert = of(cells, "gpt_pre"), of(cells, "bert_pre")
    tuned = {what: of(by_model(scores, tasks), "bert_pre") for what, tasks in PRIMARY.items()}
    nats, points, teacher = "nats", "points", "gpt_distilled"
    found = [
        ("a larger GPT has a lower loss", nats, order(-gpt["loss"], gpt["width"])),
        ("a larger GPT has a higher BLiMP score", points, order(gpt["blimp"], gpt["width"])),
        ("a larger BERT has a lower loss", nats, order(-bert["loss"], bert["width"])),
        ("a larger BERT has a higher BLiMP score", points, order(bert["blimp"], bert["width"])),
        *((f"a larger BERT is better in {w}", points, order(t["score"], t["width"])) for w, t in tuned.items()),
        ("at equal tokens a teacher lowers the loss", nats, paired(cells, teacher, "gpt_pre", "less")),
        ("at equal FLOPs a teacher changes the loss", nats, paired(cells, teacher, "gpt_long", "two-sided")),
    ]
    tests = [{"claim": claim, "unit": unit} | test for claim, unit, test in found]
    for test, p_holm in zip(tests, holm([test["p"] for test in tests]), strict=True):
        test |= {"p_holm": p_holm, "supported": p_holm < LEVEL}
    for number in (0, 2):
        tests[number]["refuted"] = bool(tests[number]["effect"] < 0)
    return tests


def of(rows: pd.DataFrame, arm: str) -> pd.DataFrame:
    """The rows of an arm."""
    return rows[rows["arm"] == arm]


def association(cells: pd.DataFrame, scores: pd.DataFrame) -> tuple[float, int]:
    """Spearman's correlation of BERT's loss with its mean primary score, and the number of pretrainings."""
    means = by_model(scores, [task for tasks in PRIMARY.values() for task in tasks])
    both = cells.merge(means, left_on=[*MODEL, "seed"], right_on=[*MODEL, "model"])
    return float(stats.spearmanr(both["loss"], both["score"]).statistic), len(both)


def summarize(records: Mapping[str, dict[str, Any]], left: list[str]) -> dict[str, Any]:
    """The record of the study: means over pretrainings, medians over finetunings, the correlation, and the tests.

    Args:
        left: cells without a record, without which there are no tests.
    """
    cells, scores = models(records), finetunings(records)
    found: dict[tuple[str, str], list[float]] = {}
    for name, record in records.items():  # of finetunings every metric, because Table 5 prints several
        task, *place = name.split("/")
        if "task" in record["config"] or task == "ensemble":
            where = "/".join(place[:2] if task != "ensemble" else ["ensemble", place[1]])
            for metric, entry in record["metrics"].items():
                if metric.startswith(f"{place[0] if task == 'ensemble' else task}/") and entry["value"] is not None:
                    found.setdefault((f"{where}/{metric}", entry["unit"]), []).append(entry["value"])
    metrics = {name: {"value": float(np.median(values)), "unit": unit} for (name, unit), values in found.items()}
    for (arm, width), row in cells.drop(columns=["seed", "parameters"]).groupby(MODEL).mean().iterrows():
        named = {column: {"value": value, "unit": UNITS.get(column, "%")} for column, value in row.dropna().items()}
        metrics |= {f"{arm}/{width}/{column}": entry for column, entry in named.items()}
    times = [record["metrics"].get("cpu_time", {}).get("value", 0.0) for record in records.values()]
    metrics["cpu_time"] = {"value": sum(times) / 3600, "unit": "core-hours"}
    if not left:
        correlation, number = association(cells, scores)
        metrics["association"] = {"value": correlation, "unit": f"Spearman's rho of {number} pretrainings"}
    config = {"tests": [] if left else decide(cells, scores), "cells": len(records), "left": len(left)}
    return new_record("miniature", "scaled_down", config, 1, metrics, **ONE_THREAD)


@one_line_errors()
def main() -> int:
    """Print the tables and the tests, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=existing_path, default=run.RECORDS, help="file of the cells' records")
    options = parser.parse_args()
    records = read_lines(options.records)
    plan = yaml.safe_load(run.CELLS.read_text(encoding="utf-8"))
    left = [cell.name for cell in run.Study(plan, Path(), Path(), records).cells() if cell.name not in records]
    if not any(name.startswith("pretrain/") for name in records):
        raise ValueError(f"`--records` must have a scored pretraining, but {options.records} has none yet")
    cells, scores = models(records), finetunings(records)
    print(cells.groupby(MODEL).mean().drop(columns="seed").to_string(float_format="{:.4g}".format))
    print(score_table(scores).to_string(float_format="{:.1f}".format))
    record = summarize(records, left)
    for number, test in enumerate(record["config"]["tests"], 1):
        print(f"test {number}: {outcome(test)}")
    if left:
        print(f"the tests wait for {len(left)} cells")
    write_record(record, options.records.with_suffix(".json"))
    print(f"record: {options.records.with_suffix('.json')}")
    return 0


def outcome(test: dict[str, Any]) -> str:
    """A test of `decide` in words."""
    size = f"{test['effect']:+.3g} {test['unit']}, p {test['p_holm']:.2g} after Holm"
    word = "supported" if test["supported"] else "refuted" if test["refuted"] else "not supported"
    return f"{test['claim']}: {word} ({size})"


if __name__ == "__main__":
    sys.exit(main())
