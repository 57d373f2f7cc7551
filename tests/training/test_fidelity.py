"""Every setting of `fidelity=` changes a run and is listed in its record."""

from pathlib import Path

import pytest
from composed import composed as values_of
from omegaconf import OmegaConf
from runs import REPOSITORY, read_record, read_rows, run_jobs, tiny_run, train_here

from lmscale.config.finetune import FinetuneConfig
from lmscale.config.pretrain import RunConfig
from lmscale.training.step.learning_rate import learning_rate_of_update

TINY = ("model.num_layers=2", "model.hidden_size=24", "model.max_position_embeddings=33", "model.vocab_multiple=64")
TINY += ("tokenizer.vocab_size=600", "precision=fp64", "compile=false", "logger.tensorboard=false")
TINY += ("trainer.max_steps=3", "trainer.validate_every_steps=0", "trainer.num_validation_samples=7")
TINY += ("trainer.num_threads=1", "trainer.accelerator=cpu", "trainer.progress_bar=false", "checkpoint.save_last=false")
TINY += ("schedule.warmup_steps=1", "micro_batch_size=2", "global_batch_size=8")
# The model whose run a setting changes. BERT scores different numbers of tokens per sample, and its post-norm epsilon
# differs from 1e-5; GPT uses a different GELU.
GPT, BERT = "model=gpt_tiny", "model=bert_tiny"
SHOWN_BY = {
    ("megatron_v1", "loss_reduction"): BERT,
    ("megatron_v1", "schedule.formula"): GPT,
    ("megatron_v1", "model.layer_norm_eps"): BERT,
    ("megatron_v1", "model.gelu"): GPT,
    ("modern", "optimizer.beta2"): GPT,
    ("modern", "optimizer.weight_decay"): GPT,
    ("modern", "model.layer_norm_eps"): BERT,
    ("modern", "model.hidden_dropout"): GPT,
    ("modern", "model.attention_dropout"): GPT,
}
WORDS = ("paper", "megatron_v1", "modern")


def points_of(word: str) -> dict[str, object]:
    """The settings of one fidelity by dotted key, from its file."""
    content = OmegaConf.to_container(OmegaConf.load(REPOSITORY / "conf" / "train" / "fidelity" / f"{word}.yaml"))
    assert content.pop("fidelity") == word
    found = {}
    for key, value in content.items():
        found |= {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
    return found


def composed(folder: Path, *overrides: str) -> RunConfig:
    norm_order = "model.norm_order=post" if BERT in overrides else "model.norm_order=pre"
    values = values_of("train", *TINY, norm_order, *overrides)
    return RunConfig.from_dict(values | {"run_dir": str(folder), "overrides": list(overrides)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One run per fidelity, and one per setting with that setting reverted to the paper's value."""
    folder = tmp_path_factory.mktemp("fidelity")
    needed = {(word, model) for (word, _), model in SHOWN_BY.items()} | {(word, GPT) for word in WORDS}
    runs = [composed(folder / f"{w}_{m[6:]}", f"fidelity={w}", m) for w, m in sorted(needed)]
    for (word, point), model in SHOWN_BY.items():
        value = composed(folder, "fidelity=paper", model).to_dict()
        for key in point.split("."):
            value = value.get(key)
        back = "null" if value is None else value
        runs.append(composed(folder / f"{word}_without_{point}", f"fidelity={word}", model, f"{point}={back}"))
    for run in runs:
        train_here(run)
    return folder


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(row["train/loss"], row["grad_norm"]) for row in read_rows(folder)]


def test_every_setting_of_every_fidelity_is_tested_here() -> None:
    on_two_ranks = {("megatron_v1", "dropout_seeds")}  # the last test
    assert set(SHOWN_BY) | on_two_ranks == {(word, point) for word in WORDS for point in points_of(word)}


@pytest.mark.parametrize(("word", "point"), SHOWN_BY)
def test_reverting_one_setting_changes_the_run(folder: Path, word: str, point: str) -> None:
    whole, without = curve(folder / f"{word}_{SHOWN_BY[word, point][6:]}"), curve(folder / f"{word}_without_{point}")
    assert len(whole) == len(without) == 3
    rows = zip(whole, without, strict=True)
    assert max(abs(loss / other - 1) for (loss, _), (other, _) in rows) > 1e-9


def test_the_first_update_of_megatron_v1_has_a_rate_of_0(folder: Path) -> None:
    rates = {word: read_rows(folder / f"{word}_gpt_tiny")[0]["lr"] for word in WORDS}
    assert rates == {"paper": 3e-3, "megatron_v1": 0.0, "modern": 3e-3}


def test_the_record_lists_the_fidelity_and_its_settings(folder: Path) -> None:
    for word in WORDS:
        config = read_record(folder / f"{word}_gpt_tiny")["config"]
        assert config["fidelity"] == word
        for point, value in points_of(word).items():
            group, _, key = point.rpartition(".")
            assert (config[group] if group else config)[key] == value


def test_finetuning_with_megatron_v1_ends_at_13_percent_of_the_peak_rate() -> None:
    last = {}
    for word in ("paper", "megatron_v1"):
        values = values_of("finetune", f"fidelity={word}", "ckpt=x", "optimizer.lr=1e-4", complete=False)
        run = FinetuneConfig.from_dict(values | {"run_dir": "/somewhere"})
        assert run.fidelity == word
        last[word] = learning_rate_of_update(1001, run.schedule(1000), run.optimizer.lr)
    assert last == {"paper": 0.0, "megatron_v1": pytest.approx(1.3e-5)}


def test_shared_seeds_give_every_data_rank_the_dropout_of_the_first(tmp_path: Path) -> None:
    """If all samples are equal, two ranks with the same masks compute the result of a single rank."""
    (tmp_path / "text.txt").write_text("\n\n".join(["and " * 8000] * 2))
    settings = {"model__hidden_dropout": 0.2, "model__attention_dropout": 0.2, "micro_batch_size": 2}
    settings |= {"data__kind": "local", "data__path": str(tmp_path / "text.txt"), "tokenizer__vocab_size": 300}
    settings |= {"trainer__max_steps": 1, "checkpoint__save_last": False}
    two = settings | {"parallel__dp_size": 2, "global_batch_size": 8}
    run_jobs([tiny_run("gpt", tmp_path / seeds, dropout_seeds=seeds, **two) for seeds in ("shared", "unique")], 2)
    train_here(tiny_run("gpt", tmp_path / "alone", global_batch_size=4, **settings))
    (alone,), (shared,), (unique,) = (curve(tmp_path / name) for name in ("alone", "shared", "unique"))
    assert shared == pytest.approx(alone, rel=1e-12)
    assert abs(unique[0] / alone[0] - 1) > 1e-6 and abs(unique[1] / alone[1] - 1) > 1e-6
