"""`python src/plan.py` for a distillation: with a teacher, and with a cache of its log-probabilities."""

import re

import pytest
from plan_output import planned, printed, refusal

MODEL = ("model=bert_336m", "cluster=h100", "num_devices=64")
TEACHER, CACHE = "model@teacher.model=bert_3.9b", "teacher.top_k=64"
RULE = "null with `teacher.model`, else at most `model.vocab_size` (30522)"


def test_a_search_compares_layouts_of_both_models_in_one_stage() -> None:
    alone, teacher, cache = (planned(*MODEL, *more, "best=true", "top=1") for more in ((), (TEACHER,), (CACHE,)))
    first, of_teacher, of_cache = (each["fitting"][0] for each in (alone, teacher, cache))
    assert {each["layout"]["pp_size"] for each in (of_teacher, of_cache)} == {1}
    assert of_teacher["step_time_s"]["total"] > 2 * of_cache["step_time_s"]["total"]
    assert of_cache["step_time_s"]["total"] >= first["step_time_s"]["total"]
    assert first["teacher"] == {}
    assert of_teacher["teacher"] == {
        "parameters": 3_869_588_482,
        "step_flops": of_teacher["step_flops"]["model"] - first["step_flops"]["model"],
    }
    assert of_cache["teacher"] == {"cache_bytes": 2_000_000 * 1024 * (76 * (64 * 2 + 65 * 2) + 8)}


def test_a_layout_shows_the_teacher_its_memory_and_its_messages() -> None:
    text = printed(*MODEL, TEACHER, "parallel.tp_size=2", "micro_batch_size=16")
    for line in ("teacher: parameters", "teacher: step flops", "teacher rows", "forward: teacher: embedding"):
        assert f" {line} " in text
    assert "teacher" not in printed(*MODEL, "parallel.tp_size=2", "micro_batch_size=16").lower()
    assert re.search(r" teacher: cache bytes +40\.17 T\n", printed(*MODEL, CACHE))


def test_a_refusal_names_a_layout_that_fits_both_models() -> None:
    found = refusal(*MODEL, TEACHER, "parallel.tp_size=16")
    assert "`teacher.model.num_attention_heads` must be a multiple of `parallel.tp_size` (16), but is 40" in found
    assert "the nearest layout that works is parallel.tp_size=8 parallel.dp_size=8 " in found
    small = ("cluster.memory_gib=12", "parallel.tp_size=1", "parallel.dp_size=64")
    assert "parallel.tp_size=1 " in printed(*MODEL, *small, "micro_batch_size=1")
    found = refusal(*MODEL, *small, TEACHER, "micro_batch_size=1")
    near = found.partition("the nearest layout that works is ")[2].split()
    assert near[0] == "parallel.tp_size=2"
    assert printed(*MODEL, "cluster.memory_gib=12", TEACHER, *near)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ((TEACHER, CACHE), f"`teacher.top_k` must be {RULE}, but is 64"),
        (("teacher.top_k=30523",), f"`teacher.top_k` must be {RULE}, but is 30523"),
        (("model@teacher.model=gpt_355m",), "`teacher.model.family` must be that of `model` (bert), but is 'gpt'"),
        ((TEACHER, "model.vocab_size=null"), "`teacher.model.vocab_size` must be that of `model` (null), but is 30522"),
        ((TEACHER, "teacher.model.vocab_size=30000"), "`teacher.model.vocab_size` must be that of `model` (30522)"),
        (
            (TEACHER, "teacher.model.max_position_embeddings=500"),
            "`data.seq_length` must be at most the 500 positions of the teacher, but is 512",
        ),
        ((TEACHER, "parallel.pp_size=2"), "`parallel.pp_size` must be 1 with a teacher, but is 2"),
        ((CACHE, "best=true", "parallel.pp_size=2"), "`parallel.pp_size` must be 1 with a teacher, but is 2"),
        ((TEACHER, "measure=1"), "`measure` must be 0 with `best`, `operations` or a teacher, but is 1"),
    ],
)
def test_a_teacher_that_does_not_suit_the_model_or_the_request_is_refused(overrides, message) -> None:
    assert message in refusal(*MODEL, *overrides)
