"""One run of a scaling sweep as one row: its parametrization, size, tokens, rate and seed, and the loss it reached."""

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.report.records import read_lines
from lmscale.config import TransformerConfig
from lmscale.config.model import BASES
from lmscale.planner.flops import model_flops_per_step
from lmscale.planner.params import count_parameters
from lmscale.results import read_record, validation_set

ARM = ["family", "norm_order", "qk_norm", "parametrization"]
SIZE = ["num_layers", "hidden_size"]
LEARNED = 0.1  # nats below a unigram model: a run that ends there has learned
KEPT = ("name", "model", "data", "tokenizer", "optimizer", "schedule", "trainer", "precision", "global_batch_size")
SHAPE = ("num_attention_heads", "ffn_hidden_size", "layer_norm_eps", "gelu")  # which follow from the others
VARIED = {  # keys that may differ between the runs of one study
    "model": ("architecture", *ARM[1:], *SIZE, *SHAPE, *BASES, "initializer_std"),
    "optimizer": ("lr",),
    "schedule": ("decay_steps", "warmup_steps", "cooldown_steps", "min_lr"),
    "trainer": ("max_steps", "validate_every_steps", "max_validation_share", "num_threads", "progress_bar")
    + ("stop_after_steps", "profiler"),
}


def describe_run(folder: Path) -> dict[str, Any]:
    """What a study keeps of a finished run's record.

    Raises:
        ValueError: it is not the record of a pretraining, or of one that was stopped before its last step.
    """
    record = read_record(folder / "record.json")
    try:
        config, metrics = record["config"], record["metrics"]
        kept = {name: config[name] for name in KEPT} | {"validation_set": validation_set(record)}
        loss = metrics.get("val/lm_loss", metrics["val/loss"])  # a GPT has one term
        done, wanted = metrics["steps"]["value"], config["trainer"]["max_steps"]
        found = {"loss": loss, "steps": metrics["steps"], "train_time": metrics["train_time"]}
        if "val/unigram_cross_entropy" in metrics:  # of GPT
            found["unigram"] = metrics["val/unigram_cross_entropy"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'record.json'} must be the record of a pretraining, but has no {error}") from None
    if done < wanted:
        raise ValueError(f"a run must have ended, but {folder} was stopped after {done} of {wanted} steps")
    same = ("record_version", "name", "command", "seed", "started", "finished", "layout", "environment")
    return {key: record[key] for key in same} | {"kind": "scaled_down", "metrics": found, "config": kept}


def read_runs(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The runs in files of records (.jsonl) and at or below run folders, by ID; a folder's is its path from there.

    Raises:
        ValueError: a path has none, or an ID occurs twice.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        if path.suffix == ".jsonl":
            here = read_lines(path)
        else:
            folders = [file.parent for file in sorted(path.resolve().rglob("record.json"))]
            for file in sorted(path.resolve().rglob("metrics.csv")):
                if file.parent not in folders:
                    print(f"left out: {file.parent} has no record.json yet", file=sys.stderr)
            here = {each.relative_to(path.resolve().parent).as_posix(): describe_run(each) for each in folders}
        if not here:
            raise ValueError(f"a path must be a file of records or hold finished runs, but {path} has none")
        if again := found.keys() & here.keys():
            raise ValueError(f"the runs must be different, but {min(again)} occurs twice")
        found |= here
    return found


def tabulate(runs: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """One row per run, indexed by its ID. A parametrization is named with its initial deviation if others are larger.

    Returns:
        family, norm_order, qk_norm, parametrization; num_layers, hidden_size; tokens; lr; seed; loss (nats per scored
        token; nan if it is not finite); unigram (the loss of a unigram model; inf where it is not recorded);
        parameters, without_embeddings; flops of the training, by the paper's formula; train_time (s).

    Raises:
        ValueError: the runs differ in a setting that no scaling study varies, or two differ in nothing.
    """
    rows, first = {}, {}
    for name, run in runs.items():
        config = run["config"]
        shared = {key: value for key, value in config.items() if key not in ("name", "validation_set", *VARIED)}
        shared |= {
            f"{part}.{key}": value
            for part, varied in VARIED.items()
            for key, value in config[part].items()
            if key not in varied
        }
        family = config["model"]["architecture"]
        shared["validation_set"] = config["validation_set"]
        before = first.setdefault(family, (name, shared))
        for key in (key for key in shared if shared[key] != before[1].get(key)):
            raise ValueError(f"`{key}` must be the same in all runs, but differs between {before[0]} and {name}")
        model = TransformerConfig.from_dict(config["model"])
        counts = count_parameters(model)
        embeddings = counts.parts["word embedding"] + counts.parts["position embedding"]
        steps, batch, length = (
            run["metrics"]["steps"]["value"],
            config["global_batch_size"],
            config["data"]["seq_length"],
        )
        loss, unigram = (run["metrics"].get(key, {}).get("value") for key in ("loss", "unigram"))
        rows[name] = {
            "family": family,
            **{key: getattr(model, key) for key in (*ARM[1:], *SIZE, "initializer_std")},
            "tokens": steps * batch * length,
            "lr": config["optimizer"]["lr"],
            "seed": run["seed"],
            "loss": math.nan if loss is None else loss,
            "unigram": math.inf if unigram is None else unigram,
            "parameters": counts.total,
            "without_embeddings": counts.total - embeddings,
            "flops": steps * model_flops_per_step(model, length, batch),
            "train_time": run["metrics"]["train_time"]["value"],
        }
    cells = pd.DataFrame.from_dict(rows, orient="index")
    deviations = cells.pop("initializer_std")
    own = ", std " + deviations.map("{:g}".format)
    cells["parametrization"] += own.where(deviations < deviations.max(), "")
    twice = cells[cells.duplicated([*ARM, *SIZE, "tokens", "lr", "seed"], keep=False)]
    if len(twice):
        raise ValueError(
            f"two runs must differ in size, rate or seed, but {twice.index[0]} and {twice.index[1]} do not"
        )
    return cells


def mean_losses(runs: pd.DataFrame) -> pd.Series:
    """Mean loss over the seeds by rate; inf where the loss of one is not finite."""
    return runs["loss"].fillna(math.inf).groupby(runs["lr"]).mean()


def learned_means(runs: pd.DataFrame) -> pd.Series:
    """Mean loss over the seeds by rate; nan unless all have learned."""
    learned = (runs["loss"] <= runs["unigram"] - LEARNED).groupby(runs["lr"]).all()
    return mean_losses(runs).where(learned)
