"""`python src/plan.py` where it chooses the layout, the devices or an alternative."""

import re

import pytest
from plan_output import PAPER, planned, printed, refusal


def test_the_search_finds_the_papers_layout_for_its_largest_model_on_its_cluster() -> None:
    answer = planned("model=gpt_8.3b", "best=true", "cluster=dgx2h_v100", "parallel.pp_size=1", "top=500")
    layouts = [entry["layout"] for entry in answer["fitting"]]
    first = next(one for one in layouts if not (one["zero1"] or one["sequence_parallel"]))  # both are later
    assert (first["tp_size"], first["dp_size"]) == (8, 64)
    times = [entry["step_time_s"]["total"] for entry in answer["fitting"]]
    assert times == sorted(times)
    assert {entry["layout"]["tp_size"] for entry in answer["too_large"]} == {1}
    assert all(entry["missing_bytes"] > 0 for entry in answer["too_large"])
    table = printed("model=gpt_8.3b", "best=true", "parallel.pp_size=1", "top=2", "parallel.sequence_parallel=false")
    assert "best: parallel.tp_size=4 parallel.dp_size=128" in table and "refused: tp 1 x dp 512" in table


@pytest.mark.parametrize(
    "overrides, words",
    [
        (
            ["parallel.tp_size=3"],
            [
                "`model.num_attention_heads` must be a multiple of `parallel.tp_size` (3), but is 32",
                "parallel.tp_size=8",
            ],
        ),
        (
            ["parallel.tp_size=16", "parallel.dp_size=64"],
            [
                "(16 x 64) must be at most the 512 devices of dgx2h_v100",
                "nearest layout that works is parallel.tp_size=16",
            ],
        ),
        (
            ["parallel.tp_size=4", "parallel.dp_size=128", "micro_batch_size=1"],
            [
                "a rank needs",
                "more than the 30.0 that each V100 of cluster=dgx2h_v100 leaves",
                "parallel.tp_size=8 parallel.dp_size=64",
            ],
        ),
        (
            ["parallel.tp_size=8", "micro_batch_size=3"],
            ["`global_batch_size` must be a multiple", "micro_batch_size=4"],
        ),
        (
            ["model.hidden_size=25600", "model.num_layers=128", "model.num_attention_heads=160"],
            ["no layout works", "needs least memory, parallel.tp_size=160 parallel.dp_size=1", "GiB"],
        ),
        (
            ["best=true", "num_devices=7"],
            ["`num_devices` must be", "but is 7; a layout fits with num_devices=8"],
        ),
        (["best=true", "num_devices=2"], ["`num_devices` must be", "GiB", "parallel.tp_size=8 parallel.dp_size=1"]),
        (["num_devices=1024"], ["`num_devices` must be at most the 512 of dgx2h_v100, but is 1024"]),
        (
            ["num_devices=4", "parallel.tp_size=8", "parallel.dp_size=1"],
            ["(8 x 1) must be at most the 4 devices of dgx2h_v100"],
        ),
        (
            ["global_batch_size=1", "parallel.tp_size=auto"],
            ["no tp_size fits", "parallel.tp_size=8 parallel.dp_size=1"],
        ),
        (
            ["find_recompute=false", "model.attention=exact", *PAPER],
            ["2.3 more than the 30.0", "model.recompute=selective"],
        ),
        (["precision=fp32", "cluster.peaks.fp32=null"], ["`precision.dtype` must be one of fp64, fp16 on dgx2h_v100"]),
        (
            ["cluster=h200", "parallel.tp_size=2", "parallel.batch_halves=true", "micro_batch_size=1"],
            ["must be even with `parallel.batch_halves`, but is 1", "micro_batch_size=2", "parallel.batch_halves=true"],
        ),
    ],
)
def test_an_impossible_plan_is_refused_with_the_limit_and_an_alternative(overrides, words) -> None:
    message = refusal(*overrides)
    for word in words:
        assert word in message


def test_auto_layouts_are_a_choice_of_the_group() -> None:
    job = ("model=gpt_8.3b", "num_devices=32")
    answer, best = planned(*job, "parallel=auto"), planned(*job, "best=true")
    assert (answer["layout"]["tp_size"], answer["layout"]["dp_size"]) == (8, 4)
    assert answer["ranking"] == {key: best[key] for key in best if key not in ("name", "validation")}
    assert "best: parallel.tp_size=" in printed(*job, "parallel=auto")


def test_more_tensor_ranks_are_taken_before_more_recomputation() -> None:
    job = ["model=gpt_2.5b", "cluster=h100", "micro_batch_size=16", "model.recompute=auto"]
    layout = planned(*job, "parallel.tp_size=auto")["layout"]
    assert (layout["tp_size"], layout["recompute"]) == (2, "none")
    assert planned(*job, "parallel.tp_size=1")["layout"]["recompute"] == "full"  # which fits as well


def test_a_search_uses_the_largest_possible_number_of_devices() -> None:
    best = planned("model=gpt_8.3b", "best=true", "parallel.pp_size=1", "global_batch_size=511")["fitting"][0]["layout"]
    assert (best["tp_size"], best["dp_size"]) == (32, 7)  # no layout of 511 devices fits


def test_a_search_compares_numbers_of_stages_unless_one_is_given() -> None:
    """Of the tensor groups that divide Turing-NLG's 28 heads only that of four fits V100s with one stage."""
    job = ["model=gpt_17b", "cluster=dgx2h_v100", "num_devices=64", "best=true", "top=1000"]
    answer = planned(*job)
    layouts = [entry["layout"] for entry in answer["fitting"]]
    assert {layout["pp_size"] for layout in layouts} >= {2, 4, 8}
    assert {entry["layout"]["tp_size"] for entry in answer["too_large"]} == {1, 2}
    assert {entry["layout"]["pp_size"] for entry in planned(*job, "parallel.pp_size=2")["fitting"]} == {2}
    assert "refused: tp 1 x pp 1 x dp 64 needs" in printed(*job)
    refused = refusal(*(word for word in job if "best" not in word), "parallel.tp_size=2")
    assert "the nearest layout that works is parallel.tp_size=4 parallel.pp_size=4" in refused


def test_a_search_keeps_the_sizes_and_options_that_are_typed() -> None:
    job = ["model=gpt_2.5b", "cluster=h100", "num_devices=8", "best=true", "parallel.pp_size=1"]
    assert planned(*job, "parallel.tp_size=auto")["fitting"] == planned(*job)["fitting"]
    for size in (1, 4):
        fitting = planned(*job, f"parallel.tp_size={size}")["fitting"]
        assert {entry["layout"]["tp_size"] for entry in fitting} == {size}
    typed = {"zero1": False, "batch_halves": False, "sequence_parallel": True}
    given = [f"parallel.{name}={str(value).lower()}" for name, value in typed.items()]
    layouts = [entry["layout"] for entry in planned(*job, *given, "parallel.dp_size=2")["fitting"]]
    assert layouts and all(typed.items() <= each.items() and each["dp_size"] == 2 for each in layouts)
    odd = ["model=gpt_2.5b", "cluster=h100", "num_devices=60", "best=true", "parallel.zero1=false"]
    assert any("excludes tp_size 1, 2, 4;" in note for note in planned(*odd)["notes"])
    large = ["model=gpt_17b", "cluster=dgx2h_v100", "num_devices=256", "best=true", "parallel.pp_size=1"]
    assert "even parallel.tp_size=4 " in refusal(*large, "parallel.zero1=false")
    refused = refusal(*job, "parallel.tp_size=3")
    assert "one that a layout with parallel.tp_size=3 can use, but is 8" in refused


def test_a_search_with_fewer_micro_batches_than_stages_has_an_answer() -> None:
    job = ["model=gpt_17b", "cluster=h100", "num_devices=16", "best=true", "global_batch_size=4"]
    fitting = planned(*job, "parallel.pp_size=16")["fitting"]
    assert {entry["layout"]["pp_size"] for entry in fitting} == {16}


@pytest.mark.parametrize(
    ("number", "stages", "message"),
    [
        (7, None, "times a `pp_size` of 1, 2, 3, 4, 6, .* or 78 times .* a layout fits with num_devices=12$"),
        (8, 3, "that divides the model times a `pp_size` of 3 times a `dp_size`.* num_devices=6, num_devices=12$"),
    ],
)
def test_a_search_over_stages_names_them_and_a_number_on_which_one_fits(number, stages, message) -> None:
    cluster = "h100" if stages else "dgx2h_v100"
    given = [f"parallel.pp_size={stages}"] * (stages is not None)
    refused = refusal("model=gpt_17b", f"cluster={cluster}", f"num_devices={number}", "best=true", *given)
    assert re.search(message, refused), refused


def test_the_devices_of_one_layout_are_a_multiple_of_its_stages() -> None:
    job = ["model=gpt_17b", "cluster=h100", "num_devices=60"]
    refused = refusal(*job, "parallel.pp_size=16")
    assert "`parallel.tp_size` (1) times `parallel.pp_size` (16) times a `parallel.dp_size`" in refused
    assert "such numbers near it: 48 and 96;" in refusal(*job, "parallel.pp_size=3")
    assert "`parallel.pp_size` must be at most `model.num_layers` (78)" in refusal(*job, "parallel.pp_size=79")


def test_a_search_keeps_sequence_parallelism() -> None:
    options = ["model=gpt_2.5b", "cluster=h100", "num_devices=12", "global_batch_size=12", "data.seq_length=1000"]
    assert "parallel.sequence_parallel=true" in printed(*options, "best=true", "parallel.sequence_parallel=true")


def test_a_search_compares_halves_of_the_micro_batch() -> None:
    sizes = [
        "model=gpt_8.3b",
        "num_devices=8",
        "global_batch_size=8",
        "best=true",
        "top=500",
        "cluster=h200",
        "parallel.pp_size=1",
        "parallel.sequence_parallel=false",
    ]
    layouts = [plan["layout"] for plan in planned(*sizes)["fitting"]]
    on_h200 = [one for one in layouts if not one["zero1"]]
    kept = ("tp_size", "micro_batch_size", "recompute")
    whole, halves = (
        {tuple(one[key] for key in kept) for one in on_h200 if one["batch_halves"] == on} for on in (False, True)
    )
    assert halves == {one for one in whole if one[0] > 1 and one[1] % 2 == 0} != set()
    assert len(halves) + len(whole) == len(on_h200)
    eight = next(one for one in on_h200 if one["tp_size"] == 8)
    assert eight["batch_halves"]
    table = printed(*sizes)
    assert (
        " halves  recompute" in table and f"{8:>7}{'':>8}{'yes':>8}" in table and "parallel.batch_halves=true" in table
    )
    table = printed(*sizes, "parallel.batch_halves=true")
    assert " halves  recompute" not in table and "batch_halves=true" in table.splitlines()[1]


def test_a_search_compares_zero1_and_says_what_it_compares() -> None:
    job = ["model=gpt_8.3b", "cluster=h100", "num_devices=32", "best=true", "parallel.pp_size=1"]
    answer = planned(*job)
    assert answer["compared"][-3:] == ["zero1", "batch_halves", "sequence_parallel"]
    assert answer["fitting"][0]["layout"]["zero1"]
    fixed = planned(*job, "parallel.zero1=true")
    assert fixed["fitting"][0] == answer["fitting"][0] and fixed["compared"] == [
        *answer["compared"][:-3],
        "batch_halves",
        "sequence_parallel",
    ]
    title, compared, columns, *_ = printed(*job).splitlines()
    assert compared.endswith("zero1, batch_halves, sequence_parallel")
    assert "   zero1  halves     seq  recompute" in columns and columns.endswith("days of 300,000 steps")


@pytest.mark.parametrize("given, batches", [(48, [480, 528]), (56, [504, 560]), (63, [])])
def test_a_search_names_the_next_usable_numbers_below_and_above(given: int, batches: list[int]) -> None:
    message = refusal(
        "model=gpt_8.3b_24heads", "cluster=h100", f"num_devices={given}", "best=true", "parallel.pp_size=1"
    )
    expected = ["num_devices=32", "num_devices=64", *(f"global_batch_size={batch}" for batch in batches)]
    assert message.endswith(f", but is {given}; a layout fits with {', '.join(expected)}")


def test_a_search_names_the_limits_of_its_best_layout_and_what_is_faster() -> None:
    job = ["model=gpt_2.5b", "cluster=h100", "best=true", "parallel.pp_size=1"]
    limits, faster = planned(*job, "num_devices=40")["notes"][-1].split("; faster: ")
    assert limits == (
        "the batch of 512 is not a multiple of dp_size 40, 20, 10, which excludes tp_size 1, 2, 4; "
        "the tensor groups of tp_size 5 cross nodes of 8 devices"
    )
    on_32 = planned(*job, "num_devices=32")
    speed = on_32["fitting"][0]["tokens_per_s"]
    first, *others = faster.split(", ")
    assert first == f"num_devices=32 ({speed:,.0f} tokens/s)"
    assert [other.split(" ")[0] for other in others] == [
        "num_devices=64",
        "global_batch_size=480",
        "global_batch_size=520",
    ]
    assert refusal(*job, "num_devices=48").endswith(
        "a layout fits with num_devices=32, num_devices=64, global_batch_size=480, global_batch_size=528"
    ), "40 devices only have tensor groups that cross nodes"
    assert not any("excludes" in note or "cross nodes" in note for note in on_32["notes"])


@pytest.mark.parametrize("given, near", [(500, "256;"), (200, "128 and 256;"), (3, "2 and 4;")])
def test_devices_that_a_layout_would_leave_unused_are_refused(given: int, near: str) -> None:
    job = ["model=gpt_8.3b", "cluster=h100", "parallel.tp_size=2", "model.recompute=full", "micro_batch_size=4"]
    message = refusal(*job, f"num_devices={given}")
    assert f"the 128 micro-batches of a step, but is {given}; such numbers near it: {near}" in message
    assert planned(*job, f"num_devices={given}", "parallel.dp_size=1")["layout"]["num_devices"] == 2  # as given


def test_auto_chooses_no_tensor_ranks_for_an_odd_micro_batch_in_halves() -> None:
    options = ["model=gpt_4.2b", "cluster=h100", "precision=bf16", "num_devices=8", "parallel.batch_halves=true"]
    sizes = ["parallel.tp_size=auto", "parallel.dp_size=1", "micro_batch_size=7", "global_batch_size=7"]
    layout = planned(*options, *sizes)["layout"]
    assert (layout["tp_size"], layout["recompute"]) == (1, "full")


@pytest.mark.parametrize("size", ["tp_size=2", "dp_size=2", "pp_size=2"])
def test_measuring_refuses_a_size_that_it_would_not_keep(size: str) -> None:
    name, given = size.split("=")
    assert f"`parallel.{name}` must be " in (
        line := refusal("model=gpt_tiny", "cluster=cpu", "measure=2", f"parallel.{size}")
    )
    assert line.endswith(f"but is {given}") and "with `measure`" in line
