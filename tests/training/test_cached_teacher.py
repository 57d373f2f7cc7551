"""A cache of a teacher's predictions gives a run the losses of the teacher, whatever layouts they have."""

import os
import shutil
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import warm
from ranks import run_in_turn, run_ranks
from runs import REPOSITORY, assert_equal_runs, read_rows, run_jobs, tiny_run, train_here

from lmscale.checkpoint import list_checkpoints
from lmscale.config.teacher import CacheConfig
from lmscale.data import teacher_cache
from lmscale.data.teacher_cache import TeacherCache
from lmscale.evaluation import cache_job
from lmscale.runtime import run_lock
from lmscale.runtime.run_lock import RunLock
from lmscale.training.resolve import resolve

FAMILIES = ("gpt", "bert")
STEPS, BATCH, T = 4, 8, 2.0


def cache_config(teacher: Path, written_to: Path, **changes) -> CacheConfig:
    values = {
        "ckpt": str(teacher),
        "output": str(written_to),
        "top_k": 9,
        "temperature": T,
        "data": {"kind": "embedded", "seq_length": 33},
        "tokenizer": {"kind": "trained", "vocab_size": 600},
        "trainer": {"max_steps": STEPS},
        "global_batch_size": BATCH,
        "precision": {"dtype": "fp64"},
        "accelerator": "cpu",
    }
    return CacheConfig.from_dict(values | changes)


def compute(config: CacheConfig) -> None:
    assert cache_job.compute(cache_job.prepare(config)) == 0


def _compute_all(rank: int, jobs: list) -> None:
    assert run_in_turn(rank, cache_job.compute, jobs) == [0] * len(jobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of each family a teacher, and caches made by one rank, by two tensor ranks and two data ranks, and of all ids."""
    folder = tmp_path_factory.mktemp("caches")
    sizes, jobs = {"model__hidden_size": 32, "model__num_layers": 1, "trainer__max_steps": 2}, []
    for family in FAMILIES:
        teacher = folder / f"{family}_teacher"
        assert train_here(tiny_run(family, teacher, optimizer__lr=1e-2, **sizes)) == 0
        compute(cache_config(teacher, folder / f"{family}_1", micro_batch_size=3))
        compute(cache_config(teacher, folder / f"{family}_whole", top_k=600))
        for layout in ({"tp_size": 2}, {"dp_size": 2}):
            output = folder / f"{family}_{'x'.join(layout)}"
            jobs.append(cache_job.prepare(cache_config(teacher, output, micro_batch_size=8, parallel=layout)))
    run_ranks(_compute_all, 2, jobs)
    return folder


def distilled(family: str, run_dir: Path, teacher: dict, **changes):
    settings = {"temperature": T, "weight": 0.7} | teacher
    return tiny_run(family, run_dir, teacher=settings, **({"trainer__max_steps": STEPS} | changes))


def losses(run_dir: Path) -> list[float]:
    return [row[name] for row in read_rows(run_dir) for name in ("train/loss", "train/teacher_loss") if name in row]


@pytest.mark.parametrize("vocab_size", [600, 632])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_all_ids_gives_the_losses_of_the_running_teacher(family, vocab_size, folder, tmp_path) -> None:
    """For a student with more ids than the teacher too."""
    teachers = {"path": str(folder / f"{family}_teacher")}, {"cache": str(folder / f"{family}_whole")}
    for name, teacher in zip(("runs", "cached"), teachers, strict=True):
        assert train_here(distilled(family, tmp_path / name, teacher, model__vocab_size=vocab_size)) == 0
    assert_equal_runs(tmp_path / "runs", tmp_path / "cached")
    assert min(losses(tmp_path / "cached")) > 1e-3


def test_a_cache_serves_another_layout_batch_and_a_run_that_is_resumed(folder, tmp_path) -> None:
    stopped, resumed = [], []
    for family in FAMILIES:
        assert train_here(distilled(family, tmp_path / family, {"cache": str(folder / f"{family}_1")})) == 0
        for made_by in ("tp_size", "dp_size"):
            cache, run_dir = {"cache": str(folder / f"{family}_{made_by}")}, tmp_path / f"{family}_{made_by}"
            layout = {"parallel__dp_size": 2, "micro_batch_size": 2, "data__num_workers": 1}
            if made_by == "dp_size":
                layout = {"parallel__tp_size": 2, "micro_batch_size": 8}
            stopped.append(distilled(family, run_dir, cache, trainer__stop_after_steps=2, **layout))
            resumed.append(distilled(family, run_dir, cache, resume={"path": "auto"}, **layout))
    run_jobs(stopped, 2)
    run_jobs(resumed, 2)
    for family in FAMILIES:
        for made_by in ("tp_size", "dp_size"):
            assert_equal_runs(tmp_path / family, tmp_path / f"{family}_{made_by}")


def test_a_cache_in_the_order_of_its_reads_fits_one_uninterrupted_run_alone(folder, tmp_path, monkeypatch) -> None:
    """The fault of caches that are stored by step and place, not by sample: planted, and the comparison finds it."""
    cache = {"cache": str(folder / "gpt_1")}
    assert train_here(distilled("gpt", tmp_path / "whole", cache)) == 0
    wanted, read = losses(tmp_path / "whole"), TeacherCache.read
    for changes in ({"trainer__stop_after_steps": 2}, {"resume": {"path": "auto"}}):
        turns = count()
        in_turn = lambda self, numbers, turns=turns: read(self, next(turns) * BATCH + np.arange(len(numbers)))  # noqa: E731
        monkeypatch.setattr(TeacherCache, "read", in_turn)
        assert train_here(distilled("gpt", tmp_path / "planted", cache, **changes)) == 0
    found = losses(tmp_path / "planted")
    assert found[:4] == wanted[:4] and min(abs(a - b) for a, b in zip(found[4:], wanted[4:], strict=True)) > 1e-6


def test_rows_are_those_of_the_scored_positions_and_the_others_are_0(folder) -> None:
    for family, rows in (("gpt", 33), ("bert", int(0.15 * 33))):
        cache = TeacherCache.open(folder / f"{family}_1")
        found = cache.read(np.arange(STEPS * BATCH))
        total = np.exp(found["teacher_log_p"]).sum(-1)
        used = np.abs(total - 1) < 1e-12
        assert found["teacher_ids"].shape == (STEPS * BATCH, rows, 9) and used[:, 0].all()
        assert (found["teacher_log_p"][~used] == 0).all() and used.all() == (family == "gpt")
        assert (np.diff(used.astype(int), axis=1) <= 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_several_samples_have_the_entries_of_parts_of_one(family, folder, tmp_path, monkeypatch) -> None:
    """In a micro-batch of BERT samples with fewer masks are followed by others."""
    monkeypatch.setattr(teacher_cache, "MOST_PARTS_OF_SMALL", 4)
    compute(cache_config(folder / f"{family}_teacher", tmp_path, micro_batch_size=4))
    caches, numbers = [TeacherCache.open(each) for each in (tmp_path, folder / f"{family}_1")], np.arange(STEPS * BATCH)
    assert [cache.facts["part_samples"] for cache in caches] == [8, 1]
    found, wanted = (cache.read(numbers) for cache in caches)
    assert np.array_equal(found["teacher_ids"], wanted["teacher_ids"])
    assert np.allclose(found["teacher_log_p"], wanted["teacher_log_p"], rtol=1e-12, atol=1e-12)


REFUSED = [
    ("gpt", {"temperature": 1.0}, {}, r"`teacher.temperature` must be 2.0, that of the cache in .*, but is 1.0"),
    ("bert", {}, {}, "`model.family` must be 'gpt', that of the cache"),
    ("gpt", {}, {"data__seq_length": 32}, "`data.seq_length` must be 33, that of the cache"),
    ("gpt", {}, {"seed": 1}, "`seed` must be 1234, that of the cache"),
    ("gpt", {}, {"trainer__max_steps": 5}, "`trainer.max_steps` must be at most 4, as `teacher.cache` has 32 samples"),
    ("gpt", {}, {"global_batch_size": 16}, "`trainer.max_steps` must be at most 2, as `teacher.cache` has 32 samples"),
    ("gpt", {}, {"tokenizer__vocab_size": 500}, "`tokenizer` must be '[0-9a-f]{16}', that of the cache"),
    ("gpt", {}, {"data__validation_every": 7}, "`tokenizer` must be '[0-9a-f]{16}', that of the cache"),
    ("gpt", {"cache": "nowhere"}, {}, "`teacher.cache` must be a folder of src/cache_logits.py, but nowhere/manifest"),
]


@pytest.mark.parametrize("family, settings, changes, words", REFUSED)
def test_a_run_that_the_cache_does_not_fit_is_refused_in_one_line(
    family, settings, changes, words, folder, tmp_path
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        resolve(distilled(family, tmp_path / "run", {"cache": str(folder / "gpt_1")} | settings, **changes))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "facts, changes, words",
    [
        (
            {"shuffled_for_all": True},
            {"trainer__max_steps": 3},
            "`trainer.max_steps` must be 4, as `teacher.cache` has 32 samples, shuffled for that number, but is 3",
        ),
        ({"vocab_size": 601}, {}, "`model.vocab_size` must be at least 601, the ids of `teacher.cache`, but is 600"),
        ({"data": "another"}, {}, "`data` must be 'another', that of the cache in .*, but is '[0-9a-f]{16}'"),
    ],
)
def test_shuffled_documents_other_texts_and_a_smaller_vocabulary_are_refused(
    facts, changes, words, folder, tmp_path
) -> None:
    cache, missing = TeacherCache.begin(tmp_path, TeacherCache.open(folder / "gpt_1").facts | facts)
    for part in missing:
        cache.write(part, np.zeros(len(cache.samples(part)), cache.record))
    with pytest.raises(ValueError, match=words):
        resolve(distilled("gpt", tmp_path / "run", {"cache": str(cache.folder)}, **changes))


@pytest.mark.parametrize("name, value", [("mask_probability", 0.2), ("short_seq_probability", 0.0), ("max_ngram", 1)])
def test_other_masks_are_refused(name, value, folder, tmp_path) -> None:
    with pytest.raises(ValueError, match=f"`data.{name}` must be .*, that of the cache in .*, but is {value}"):
        resolve(distilled("bert", tmp_path / "run", {"cache": str(folder / "bert_1")}, **{f"data__{name}": value}))


def test_an_incomplete_cache_is_refused_and_a_damaged_one_ends_the_run(folder, tmp_path, capfd) -> None:
    shutil.copytree(folder / "gpt_1", tmp_path / "cache")
    run = distilled("gpt", tmp_path / "run", {"cache": str(tmp_path / "cache")})
    part = TeacherCache.open(tmp_path / "cache").path(5)
    data = bytearray(part.read_bytes())
    part.unlink()
    with pytest.raises(
        ValueError, match="must be complete, but in .*cache parts are missing or cut short: part_00005.bin; the comm"
    ):
        resolve(run)
    data[7] ^= 1
    part.write_bytes(data)
    with pytest.raises(ValueError, match="part_00005.bin lacks sample 5 or is damaged there; without this file, "):
        train_here(run)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"top_k": 601}, "`top_k` must be at most the teacher's 600 ids, but is 601"),
        ({"data": {"kind": "embedded", "seq_length": 34}}, "`data.seq_length` must be at most the teacher's 33 pos"),
        ({"parallel": {"tp_size": 3}}, "`num_attention_heads` .*3"),
        (
            {"tokenizer": {"kind": "trained", "vocab_size": 500}},
            "`ckpt` must have the tokenizer of the run, but ",
        ),
        ({"output": __file__}, "`output` must be a folder that can be used, but .*.py cannot: .* File exists"),
        ({"precision": {"dtype": "fp8"}}, "`precision` must be one of fp64, fp32, bf16, fp16"),
        (
            {"data": {"kind": "embedded", "seq_length": 33, "num_workers": 2}},
            "`data.num_workers` must be 0 for a cache",
        ),
        ({"temperature": 1.0}, "`temperature` must be 2.0, that of the cache in .*gpt_1, but is 1.0"),
        ({"trainer": {"max_steps": 5}}, "`num_samples` must be 32, that of the cache in .*gpt_1, but is 40"),
    ],
)
def test_a_command_that_does_not_fit_is_refused(changes: dict, words: str, folder) -> None:
    with pytest.raises(ValueError, match=words):
        compute(cache_config(folder / "gpt_teacher", folder / "gpt_1", **changes))


def test_a_teacher_without_its_tokenizer_is_refused(folder, tmp_path) -> None:
    shutil.copytree(list_checkpoints(folder / "gpt_teacher" / "checkpoints")[-1], tmp_path / "step_2.ckpt")
    with pytest.raises(ValueError, match="`ckpt` must have its tokenizer beside it, but there is none in"):
        compute(cache_config(tmp_path / "step_2.ckpt", tmp_path / "cache"))


def test_one_command_writes_a_cache_and_a_refused_one_leaves_nothing(folder, tmp_path, monkeypatch) -> None:
    config = cache_config(folder / "gpt_teacher", tmp_path / "cache")
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.0)
    lock = RunLock()
    lock.take(tmp_path / "cache")
    with pytest.raises(ValueError, match="`output` must be a folder of one job, but .*cache is in use by another job"):
        compute(config)
    lock.release()
    full = shutil.disk_usage(tmp_path)._replace(free=99)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="`output` must be on a disk with"):
        patch.setattr(shutil, "disk_usage", lambda path: full)
        compute(config)
    assert not (tmp_path / "cache").exists()


def test_parts_that_exist_are_kept_and_the_others_are_computed_again(folder, tmp_path) -> None:
    shutil.copytree(folder / "bert_1", tmp_path / "cache")
    cache = TeacherCache.open(tmp_path / "cache")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in cache.folder.glob("part_*")}
    cache.path(3).unlink()
    compute(cache_config(folder / "bert_teacher", cache.folder, micro_batch_size=3))
    for path, (time_ns, data) in before.items():
        assert path.read_bytes() == data and (path.stat().st_mtime_ns == time_ns) == (path != cache.path(3))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_cache_of_a_narrower_type_is_close(precision: str, folder, tmp_path) -> None:
    config = cache_config(folder / "gpt_teacher", tmp_path / "cache", precision={"dtype": precision}, top_k=600)
    compute(config)
    found, wanted = (TeacherCache.open(each).read(np.arange(9)) for each in (tmp_path / "cache", folder / "gpt_whole"))
    p = [np.zeros((9, 33, 600)) for _ in range(2)]
    for whole, entries in zip(p, (found, wanted), strict=True):
        np.put_along_axis(whole, entries["teacher_ids"], np.exp(entries["teacher_log_p"][..., :-1]), -1)
    assert np.abs(p[0] - p[1]).max() < {"bf16": 2e-2, "fp16": 2e-3, "fp32": 1e-6}[precision] * p[1].max()


def test_the_command_computes_it_and_says_how_a_run_reads_it(folder, tmp_path) -> None:
    script, teacher = REPOSITORY / "src" / "cache_logits.py", folder / "gpt_teacher"
    keys = ["top_k=9", "temperature=2", "data.seq_length=33", "tokenizer.vocab_size=600", "trainer.max_steps=4"]
    keys += ["global_batch_size=8", "micro_batch_size=3", "precision=fp64", "accelerator=cpu", "output=cache"]
    done = warm.run([str(script), f"ckpt='{teacher}'", *keys], tmp_path, dict(os.environ), timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "cache: 32 parts to write, 9.66e-05 GiB",
        "complete; a run reads it with teacher.cache=cache teacher.temperature=2",
    ]
    made = [TeacherCache.open(each) for each in (tmp_path / "cache", folder / "gpt_1")]
    assert made[0].facts == made[1].facts and made[0].missing() == []
    assert made[0].path(7).read_bytes() == made[1].path(7).read_bytes()
