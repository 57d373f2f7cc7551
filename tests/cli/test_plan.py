"""`python src/plan.py` as a user runs it: output, speed and errors."""

import os
import re
import subprocess
import sys
import time

import pytest
from entry_points import REPOSITORY, environment, refuse, slurm_task
from omegaconf import OmegaConf
from plan_output import PAPER, planned, printed, refusal

import lmscale.planner.flops as flops
from analysis.scaling.study import SIZES, study_model
from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.config import Layout
from lmscale.planner.params import count_parameters


def cold(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def hydra_job(monkeypatch) -> None:
    """Hydra's own configuration of a job."""
    folder = {"mode": "RUN", "run": {"dir": "outputs"}, "runtime": {"output_dir": "outputs"}}
    job = OmegaConf.create(folder | {"overrides": {"task": []}})
    monkeypatch.setattr("lmscale.cli.hydra_main.HydraConfig.get", lambda: job)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_prints_what_follows_a_run(hydra_job, monkeypatch, capsys, rank: int) -> None:
    for name, value in slurm_task(rank, "29500").items():
        monkeypatch.setenv(name, value)
    run_task(lambda _: None, OmegaConf.create({}), then=lambda _: "plot: this")
    assert capsys.readouterr().out == ("" if rank else "plot: this\n")


def test_another_pipe_that_breaks_is_an_error(hydra_job) -> None:
    def lose_a_process(_: dict) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_task(lose_a_process, OmegaConf.create({}))


def test_closed_standard_streams_end_nothing(monkeypatch) -> None:
    """Python sets a stream to None that was closed when it started, as by `>&-`."""
    monkeypatch.setattr(sys, "argv", ["plan.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    descriptors = []

    def use_them(_: None) -> None:
        print("a line", flush=True)
        assert sys.stdin.read() == "" and not sys.stdout.isatty()
        descriptors.extend(stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr))

    monkeypatch.setattr("hydra.main", lambda **_: lambda job: lambda: job(None))
    run_hydra_main(use_them)
    assert [os.get_inheritable(number) for number in descriptors] == [True] * 3  # the ranks have them too


def test_the_papers_largest_configuration_is_planned_within_seconds() -> None:
    start = time.perf_counter()
    done = cold("src/plan.py", *PAPER)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 10  # 0.7 s on an idle core; the bound allows for a busy machine
    for word in (
        "8,317,040,640",
        "1,043,549,184",
        "27.57 P",
        "gradients",
        "MFU",
        "tokens/s",
        "days",
        "MWh",
        "modelled",
    ):
        assert word in done.stdout, word


def test_neither_torch_nor_lightning_is_imported() -> None:
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path('src/plan.py', run_name='__main__');"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'lightning', 'numpy', 'transformers'}))"
    )
    done = cold("-c", code, "src/plan.py", *PAPER, "best=true")
    assert done.stdout.endswith("[]\n"), done.stdout[-200:] + done.stderr


def test_json_has_the_exact_counts_of_the_paper_configuration() -> None:
    answer = planned(*PAPER, "micro_batch_size=8", "model.recompute=full")
    config = study_model(*SIZES["8.3B"])
    of_rank = count_parameters(config, Layout(tp_size=8)).per_rank
    assert answer["parameters"] == {"model": 8_317_040_640, "rank": of_rank}
    assert answer["step_flops"]["hardware"] == flops.hardware_flops_per_step(config, 1024, 512)
    counts = {a["what"]: a["count"] for a in answer["collectives"] if a["group"] == "tensor"}
    assert sum(counts.values()) == 6 * 72 + 2 + 3 + 1 + 1  # ..., the loss's, replicated gradients, the norm
    seconds = answer["step_time_s"]
    parts = ("matmul", "elementwise", "overhead", "tensor", "data", "optimizer")
    assert seconds["total"] == pytest.approx(sum(seconds[part] for part in parts))
    assert answer["tokens_per_s"] == pytest.approx(512 * 1024 / seconds["total"])
    assert answer["days"] == pytest.approx(300_000 * seconds["total"] / 86400)
    assert answer["energy_mwh"] == pytest.approx(600 * 512 * answer["days"] * 24 / 1e6)
    assert answer["evidence"] == {
        "counts": "exact",
        "memory": "counted, within 5 % of tracked tensors",
        "time": "fitted",
    }


@pytest.mark.parametrize(
    ("cluster", "constants"),
    [(name, "fitted to published step times") for name in ("dgx2h_v100", "dgx_a100", "h100")]
    + [("h200", "carried over from another machine"), ("cpu", "from measurements of such a machine")],
)
def test_every_cluster_plans_a_model_and_says_how_far_its_times_are_to_be_trusted(cluster, constants) -> None:
    job = ["model=gpt_355m", f"cluster={cluster}", "num_devices=2", "precision=fp32"]
    answer = planned(*job)
    assert (answer["cluster"], answer["layout"]["num_devices"]) == (cluster, 2) and 0 < answer["mfu"] < 1
    error = answer["expected_error"]
    assert "times as long" in error and planned(*job, "best=true")["fitting"][0]["expected_error"] == error
    for output in (printed(*job), printed(*job, "best=true")):
        assert output.count("constants") == 1 and f"modelled; constants {constants}" in output
        assert output.count(f"  expected error: {error}\n") == 1


def test_a_training_command_line_is_planned_unchanged() -> None:
    answer = planned("model=gpt_2.5b", "cluster=h200", "optimizer.lr=1e-3", "schedule=linear", "trainer.max_steps=7")
    assert answer["num_steps"] == 7


def test_differences_from_the_request_are_reported() -> None:
    assert planned("model=gpt_tiny")["notes"] == [
        "model.vocab_size is the tokenizer's: planned with 2,000 ids",
        "num_devices is not given: planned on 2, the most that the batch (16 in micro-batches of 8) and dgx2h_v100 "
        "(512 devices) allow",
    ]
    assert "V100 has no bf16: planned with precision=fp16" in planned("model=gpt_1.2b")["notes"]  # the recipe's
    assert planned(*PAPER)["layout"]["recompute"] == "none"
    assert planned(*PAPER, "model.recompute=full")["layout"]["recompute"] == "full"
    larger = planned(*PAPER, "model.attention=exact")
    assert larger["layout"]["recompute"] == "selective"
    assert "planned with model.recompute=selective" in larger["notes"][-1]


def test_what_is_typed_is_planned_or_refused() -> None:
    for key in ("precision=bf16", "precision.dtype=bf16"):
        refused = refusal("model=gpt_1.2b", "cluster=dgx2h_v100", key)
        assert "`precision.dtype` must be one of fp64, fp32, fp16 on dgx2h_v100 (V100), but is bf16" in refused
    job = (*PAPER, "model.attention=exact")
    assert "model.recompute=selective" in refusal(*job, "model.recompute=none")
    assert planned(*job, "model.recompute=none", "find_recompute=true")["layout"]["recompute"] == "selective"
    assert planned(*job, "model.recompute=auto")["layout"]["recompute"] == "selective"


def test_time_and_energy_have_a_unit_that_suits_them() -> None:
    job = ("model=gpt_tiny", "cluster=h100", "num_devices=1", "trainer.max_steps=300")
    for output in (printed(*job), printed(*job, "best=true")):
        assert "minutes" in output and "days" not in output
    assert re.search(r"minutes for 300 steps +[0-9.]*[1-9]", printed(*job)) and re.search(" Wh$", printed(*job), re.M)


def test_a_plan_says_what_a_validation_costs_and_refuses_what_a_run_on_gpus_refuses() -> None:
    costs = "sequences take {} of the time of the 1,000 training steps between validations"
    for key, note in {
        "auto": "trainer.num_validation_samples=auto is at most this: 76,800 " + costs.format("5.0%"),
        "null": "trainer.num_validation_samples=null is refused on a GPU where the corpus has more than this: 76,800 "
        + costs.format("5.0%"),
        "51200": "trainer.num_validation_samples=51200: 51,200 " + costs.format("3.3%"),
    }.items():
        job = ("model=gpt_2.5b", "cluster=h200", f"trainer.num_validation_samples={key}")
        assert planned(*job)["validation"] == note and printed(*job).endswith(f"\n\nvalidation: {note}\n")
    long = ("model=gpt_2.5b", "trainer.num_validation_samples=153600")
    assert refusal(*long, "cluster=h200") == (
        "`trainer.num_validation_samples` must be at most 76,800 with trainer.max_validation_share=0.05, but 153,600 "
        + costs.format("10.0%")
    )
    assert "153,600" in planned(*long, "cluster=h200", "trainer.max_validation_share=0.1")["validation"]


def test_float8_shortens_the_layers_products_and_needs_a_device_that_supports_it() -> None:
    bf16, fp8 = (planned("model=gpt_2.5b", "cluster=h200", f"precision={dtype}") for dtype in ("bf16", "fp8"))
    ratio = fp8["step_time_s"]["matmul"] / bf16["step_time_s"]["matmul"]
    assert 0.5 < ratio < 0.7  # attention and the logits stay in bf16
    layers = [one["rank_memory_bytes"]["none"]["activations"] for one in (fp8, bf16)]
    assert 0.6 < layers[0] / layers[1] < 0.7  # the outputs of LayerNorm and GELU are computed again
    assert fp8["layout"] == bf16["layout"] | {"dtype": "fp8"}
    refused = refusal("model=gpt_2.5b", "cluster=dgx_a100", "precision=fp8")
    assert "`precision.dtype` must be one of fp64, fp32, bf16, fp16 on dgx_a100" in refused


def test_a_user_defined_cluster_is_read_from_its_file(tmp_path) -> None:
    text = (REPOSITORY / "conf" / "cluster" / "h100.yaml").read_text(encoding="utf-8")
    own = tmp_path / "mine.yaml"
    own.write_text(text.replace("name: h100", "name: mine").replace("watts: 1275.0", "watts: null"), encoding="utf-8")
    answer = planned(f"cluster.path={own}", "model=gpt_1.2b")
    assert (answer["cluster"], answer["energy_mwh"]) == ("mine", None)
    own.write_text("".join(line for line in text.splitlines(True) if "expected_error" not in line), encoding="utf-8")
    answer = planned(f"cluster.path={own}", "model=gpt_1.2b")
    assert answer["expected_error"] == "unknown, because no run was compared"
    own.write_text(text + "colour: green\n", encoding="utf-8")
    assert "`cluster.colour` is not a known key" in refusal(f"cluster.path={own}")
    own.write_text(re.sub("product_share: [0-9.]+", "product_share: -0.5", text), encoding="utf-8")
    assert "`cluster.roofline.product_share` must be above 0, but is -0.5" in refusal(f"cluster.path={own}")

    own.write_text("a: [1, 2\n", encoding="utf-8")
    assert "`cluster.path` must be a YAML file, but" in refusal(f"cluster.path={own}")
    own.write_text("- a\n", encoding="utf-8")
    assert "must be a YAML file of keys as in conf/cluster" in refusal(f"cluster.path={own}")
    assert "must be a file that can be read" in refusal(f"cluster.path={tmp_path / 'none.yaml'}")


def test_the_operations_of_a_step_are_printed_on_request() -> None:
    one = ("model=bert_336m", "cluster=h200", "precision=bf16", "num_devices=1", "parallel.dp_size=1")
    answer = planned(*one, "operations=true")
    assert sum(row["seconds"] for row in answer["operations"]) == pytest.approx(answer["step_time_s"]["total"])
    assert sum(row["flops"] for row in answer["operations"]) >= answer["step_flops"]["hardware"]
    assert "attention core" in printed(*one, "operations=true")
    assert "attention core" not in printed(*one)
    assert "`operations` must be false with best=true" in refusal("cluster=h200", "operations=true", "best=true")


@pytest.mark.parametrize("override", ["data=indexed", "tokenizer=gpt2", "data.path=FOLDER", "resume=auto"])
def test_a_key_that_only_training_has_is_refused_by_saying_so(override: str) -> None:
    done = refuse("src/plan.py", "model=gpt_355m", override)
    key = override.partition("=")[0]
    reason = "src/train.py has it, src/plan.py does not: leave it out"
    expected = f"error: `{key}` is not a known key or group of the configuration; {reason}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (
            ["cluster=a100"],
            "`cluster` must be one of cpu, dgx2h_v100, dgx_a100, h100, h200, but is 'a100'; did you mean `dgx_a100`?",
        ),
        (["cluster.color=red"], "`cluster.color` is not a known key"),
        (
            ["-m", "model=gpt_1.2b", "top=1,0"],
            "job 1 of the sweep (model=gpt_1.2b top=0): `top` must be a whole number",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(overrides, words, tmp_path) -> None:
    folder = [f"hydra.sweep.dir={tmp_path}"] if "-m" in overrides else []
    done = refuse("src/plan.py", *overrides, *folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {words}") and done.stderr.count("\n") == 1


def test_a_plan_says_how_many_heads_are_computed_for_how_many_and_what_the_dummies_cost() -> None:
    command = ["model=gpt_2.5b", "parallel.tp_size=8", "cluster=h100", "num_devices=8"]
    plan, whole = planned(*command, "parallel.pad_heads=true"), planned(*command[:1], *command[2:])
    assert plan["parameters"]["model"] == whole["parameters"]["model"] == 2_490_408_960
    assert plan["step_flops"]["model"] == whole["step_flops"]["model"] < plan["step_flops"]["hardware"]
    assert plan["layout"]["pad_heads"] and not whole["layout"]["pad_heads"]
    share = 1 - whole["step_flops"]["hardware"] / plan["step_flops"]["hardware"]
    assert f"24 heads are computed for 20, 3 per rank; the 4 dummy heads are {share:.1%} of the" in plan["notes"][-1]
    num_bytes = 54 * 4 * 96 * (4 * 1920 + 3) / 8 * 18  # per rank: weights 2, gradients 4, master and moments 12
    assert f" {num_bytes / 2**30:.3f} GiB of a rank's weights" in plan["notes"][-1]
    assert plan["notes"][-1].endswith("; ranks with dummy heads only: 1")
    assert "parallel.pad_heads=true" in printed(*command, "parallel.pad_heads=true").splitlines()[1]
    assert not any("dummy" in note for note in planned(*command[:1], "parallel.pad_heads=true", *command[2:])["notes"])
    textbook = ["model=gpt_8.3b", "model.vocab_multiple=1536", "parallel.tp_size=6", "cluster=h100", "num_devices=6"]
    note = planned(*textbook, "parallel.pad_heads=true")["notes"][-1]
    assert "36 heads are computed for 32, 6 per rank; the 4 dummy heads are 4.3% of the hardware FLOPs" in note
    message = refusal(*command)
    assert "(8), but is 20, which a run with `parallel.pad_heads=true` pads to 24; valid sizes: 1, 2, 4, 5" in message


def test_the_table_names_the_time_of_messages_that_nothing_hides() -> None:
    sequence = ["model=gpt_2.5b", "cluster=h200", "num_devices=2", "parallel.tp_size=2", "micro_batch_size=8"]
    table = printed(*sequence, "global_batch_size=8", "parallel.sequence_parallel=true")
    step_time = table[table.index("step time") :]
    assert "tensor-parallel messages, not hidden" in step_time and "all-reduce" not in step_time
    ranks = ["model=gpt_355m", "cluster=h100", "num_devices=2"]
    seconds = planned(*ranks)["step_time_s"]
    assert 0 < seconds["data"] < seconds["data_hidden"]  # the embedding's piece comes last
    assert f" of {1e3 * (seconds['data'] + seconds['data_hidden']):.1f} ms" in printed(*ranks)


def test_a_ranking_says_when_it_hangs_on_how_much_messages_slow_kernels() -> None:
    ranked = ("model=bert_336m", "cluster=h100", "num_devices=64", "best=true")
    words = "depending on how much messages slow the kernels beside them; if they slow them most, "
    (note,) = (note for note in planned(*ranked)["notes"] if words in note)
    other = note.partition(words)[2].partition(" is faster")[0]
    answers = planned(*ranked, "top=5000")["fitting"]
    slowest = [each["step_time_s"]["slowest"] for each in answers]
    first = answers[slowest.index(min(slowest))]
    assert min(slowest) < slowest[0] and f"to {min(slowest):.3f} s" in note
    assert f"micro_batch_size={first['layout']['micro_batch_size']} " in other
    assert words in printed("model=bert_336m", "cluster=h100", "num_devices=64", "parallel=auto")
    alone = planned("model=gpt_355m", "cluster=h100", "num_devices=1", "best=true")
    assert not any(words in note for note in alone["notes"])


FP8 = ["precision=fp8", "cluster=h200"]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["cluster.path=conf/cluster/h100.yaml", "cluster.num_devices=4"], "`cluster.path` must be alone"),
        (["cluster.path=2026"], "`cluster.path` must be a path or null, but is 2026; quotes make it text"),
        ([f"cluster.memory_gib={10**309}"], "`cluster.memory_gib` must be a finite number, but is 1000"),
        (
            ["parallel.tp_size=4", "parallel.sequence_parallel=true", "data.seq_length=1022", "cluster=h200"],
            "`data.seq_length` must be a multiple of `parallel.tp_size` (4)",
        ),
        (
            ["precision=fp16", "precision.hysteresis=12"],
            "`precision.hysteresis` must be at most 10 with trainer.max_skipped_steps=10, but is 12",
        ),
        ([*FP8, "model.hidden_size=1900"], "a multiple of 16 x tp_size (1) with precision=fp8, but is 1900"),
        (
            [*FP8, "parallel.tp_size=2", "model.ffn_hidden_size=7600"],
            "`model.ffn_hidden_size` must be a multiple of 16 x tp_size (2) with precision=fp8, but is 7600",
        ),
        (
            [*FP8, "micro_batch_size=1", "data.seq_length=1000"],
            "`micro_batch_size` x `data.seq_length` must be a multiple of 16 with precision=fp8, but is 1 x 1000; the "
            "nearest layout that works is ",
        ),
        (
            [*FP8, "micro_batch_size=1", "global_batch_size=3", "data.seq_length=1000"],
            "but is 1 x 1000; no layout works",
        ),
        ([*FP8, "best=true", "global_batch_size=3", "data.seq_length=1000"], "a layout fits with global_batch_size=2"),
    ],
)
def test_ignored_keys_are_refused(overrides: list[str], message: str) -> None:
    assert message in refusal("model=gpt_2.5b", *overrides)


def test_a_plan_uses_the_model_settings_of_the_fidelity() -> None:
    """Without dropout no masks are saved."""
    one = ("model=gpt_355m", "parallel.dp_size=1", "num_devices=1", "model.recompute=none", "cluster=h200")
    plans = [planned(*one, f"fidelity={word}")["rank_memory_bytes"]["none"] for word in ("paper", "modern")]
    assert plans[1]["activations"] < plans[0]["activations"] and plans[1]["weights"] == plans[0]["weights"]


@pytest.mark.parametrize(
    ("cluster", "attention", "kept"), [("h100", "sdpa", "no"), ("cpu", "sdpa", "its"), ("h100", "exact", "its")]
)
def test_a_plan_says_whether_its_attention_keeps_the_scores(cluster: str, attention: str, kept: str) -> None:
    """The memory of gpt_8.3b on a CPU is not that on a GPU."""
    text = printed("model=gpt_355m", "parallel.tp_size=1", f"cluster={cluster}", f"model.attention={attention}")
    assert f"\n    activations (attention keeps {kept} scores) " in text


def test_a_plan_shows_computing_against_all_messages_and_says_when_messages_bind() -> None:
    answer = planned(*PAPER)
    seconds, messages = answer["step_time_s"], sum(answer["messages_s"].values())
    computing = seconds["matmul"] + seconds["elementwise"] + seconds["overhead"]
    assert answer["compute_to_communication"] == pytest.approx(computing / messages)
    assert messages == pytest.approx(sum(seconds[f"{g}{h}"] for g in ("tensor", "data") for h in ("", "_hidden")))
    assert "compute-bound" in printed(*PAPER)
    bound = ("model=bert_336m", "cluster=h100", "micro_batch_size=4", "global_batch_size=16")
    assert "communication-bound: messages take" in printed(*bound, "parallel.tp_size=4", "parallel.dp_size=4")
    ranking = printed(*bound, "num_devices=16", "best=true", "parallel.pp_size=1")
    assert "R below 1: communication-bound" in ranking and " R " in ranking.splitlines()[2]
    assert "   host-bound, the devices wait for their hosts: 1, 2, 3" in ranking
    assert "host-bound" not in printed(*PAPER, "best=true")
    alone = ("model=gpt_tiny", "parallel.tp_size=1", "parallel.dp_size=1", "cluster=cpu")
    assert planned(*alone)["compute_to_communication"] is None
