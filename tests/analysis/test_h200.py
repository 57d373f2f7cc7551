"""The commands of `analysis/benchmarks/h200.sh` match their entry points and time limits; failures are reported."""

import json
import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from composed import composed, composed_run

from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.gpu.attention_backends import AttentionShape
from analysis.benchmarks.gpu.products import Shape
from analysis.norm_order.cells import read_cells, read_curves
from analysis.norm_order.figure import draw_true_widths
from lmscale.config import Layout
from lmscale.config.plan import PlanConfig
from lmscale.config.pretrain import RunConfig
from lmscale.models.attention_backend import ALL_BACKENDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "analysis" / "benchmarks" / "h200.sh"
COUNTS = {"a": 9, "b": 2, "c": 4, "d": 7, "e": 6}
PARTS = [f"{name}{number}" for name, count in COUNTS.items() for number in range(1, count + 1)]
TABLE = ROOT / "docs" / "reference" / "gpu_measurements.md"
BATCH = {"gpt": 512, "bert": 1024}  # of the paper


def commands(*parts: str, **changes: str) -> list[tuple[int, list[str]]]:
    """The commands of some or all parts: seconds until the signal KILL, and the arguments after the interpreter."""
    done = subprocess.run(
        ["bash", str(SCRIPT), *parts],
        env=os.environ | {"DRY_RUN": "1"} | changes,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    lines = [shlex.split(line) for line in done.stdout.splitlines() if "not measured" not in line]
    timed = [words for words in lines if words[0] == "timeout"]
    assert all(words[:2] == ["rm", "-rf"] for words in lines if words not in timed)
    return [(int(words[3]) + int(words[2].removeprefix("--kill-after=")), words[5:]) for words in timed]


def bench_of(words: list[str]) -> BenchConfig:
    return BenchConfig.from_dict(composed("bench", *words))


def run_of(words: list[str]) -> RunConfig:
    words = [word.replace("resume=", "resume.path=") for word in words if not word.startswith("hydra.run.dir=")]
    return composed_run(*words)


def test_list_a_is_the_profile_of_the_rows_that_were_measured(tmp_path) -> None:
    found = [words for _, words in commands("a")]
    assert found == [words for part in PARTS[:9] for _, words in commands(part)]
    benches = [bench_of(words) for script, *words in found if script.endswith("bench.py")]
    assert [(b.model["name"], b.precision.dtype, b.micro_batch_size) for b in benches if b.trace] == [
        *(("gpt_1.2b", "bf16", 32), ("bert_336m", "bf16", 128), ("gpt_2.5b", "fp8", 8))
    ]
    assert {(b.steps_per_round, b.step_sequences // b.micro_batch_size) for b in benches if b.trace} == {(3, 2)}
    assert [(b.model["name"], b.precision.dtype) for b in benches if not b.trace] == [
        *(("gpt_1.2b", "bf16"), ("bert_336m", "bf16"), ("gpt_2.5b", "fp8"), ("gpt_2.5b", "bf16"))
    ]
    products = [words for words in found if words[0].endswith("products.py")]
    steps = [words[words.index("--step") + 1 : words.index("--seconds")] for words in products]
    assert steps == [["gpt_1.2b:32:bf16", "bert_336m:128:bf16"], ["gpt_2.5b:8:fp8"]]
    assert all(words[words.index("--seconds") + 1] == "10" for words in products)
    assert all(Shape.of_step(text) for texts in steps for text in texts)
    runs = [run_of(words) for script, *words in found if script == "src/train.py"]
    assert [(run.name, run.precision.dtype, run.trainer.max_steps) for run in runs] == [
        ("h200_2.5b_fp8_seed_1234", "fp8", 200),
        *((f"h200_2.5b_bf16_seed_{seed}", "bf16", 200) for seed in (1234, 1235, 1236)),
    ]
    assert found[-1][:1] == ["analysis/benchmarks/gpu/jobs.py"] and found[-1][-4:-2] == ["--accelerator", "gpu"]


def test_the_attention_shapes_match_the_models() -> None:
    words = commands("a2")[1][1]
    texts = words[words.index("--shape") + 1 : words.index("--backends")]
    assert words[words.index("--backends") + 1 : words.index("--accelerator")] == list(ALL_BACKENDS)
    assert [text.split(":")[-1] for text in texts] == ["64", "96", "128", "96"]
    for text in texts:
        shape = AttentionShape.parse(text)
        if shape.name == "gpt_head_128":  # the work of gpt_1.2b
            assert shape.n * shape.d == 16 * 96
            continue
        name, _, tp_size = shape.name.partition("_tp_")
        config = bench_of([f"model={name}", "peers=[]"]).transformer_config()
        assert (shape.n * int(tp_size or 1), shape.s, shape.d) == (
            config.num_attention_heads,
            config.max_position_embeddings,
            config.head_size,
        )
        assert shape.causal == (config.family == "gpt")


def test_list_b_is_without_dropout_after_a_test_of_its_kernels() -> None:
    tests, *rows = (words for _, words in commands("b"))
    assert tests[1:4] == ["pytest", "-m", "gpu"] and tests[tests.index("-k") + 1] == "backend_of_model_attention"
    assert tests[-1] == "tests/training/test_gpu.py"
    assert "def test_a_compiled_layer_calls_the_backend_of_model_attention" in (ROOT / tests[-1]).read_text()
    benches = [bench_of(words[1:]) for words in rows]
    assert [(b.model["name"], b.model["attention"]) for b in benches] == [
        *(("gpt_1.2b", "flash"), ("gpt_1.2b", "cudnn"), ("gpt_1.2b", "flash3"), ("gpt_2.5b", "cudnn"))
    ]
    for bench in benches:
        config = bench.transformer_config()
        assert (config.hidden_dropout, config.attention_dropout, config.input_dropout) == (0, 0, 0)


def test_list_d_has_the_machine_and_the_other_models_beside_peers(tmp_path) -> None:
    (tmp_path / "model.py").write_text("class GPT: ...\nclass GPTConfig: ...\n")
    machine, tests, *found = (words for _, words in commands("d", NANOGPT=str(tmp_path / "model.py")))
    assert machine[0] == "analysis/benchmarks/gpu/gpu_facts.py" and "-k" not in tests
    marked = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__) and "pytest.mark.gpu" in path.read_text()
    }
    assert {Path(word) for word in tests if word.startswith("tests/")} == marked
    benches = [bench_of(words) for script, *words in found if script == "analysis/benchmarks/bench.py"]
    assert [(b.model["name"], b.cuda_graphs, *b.peers) for b in benches] == [
        *(("bert_3.9b", False), ("gpt_355m", False), ("gpt_355m", True)),
        *(("gpt_355m", False, peer) for peer in ("hf_compiled", "file_compiled", "megatron_core")),
    ]
    (trained,) = (words for script, *words in found if script == "src/train.py")
    run = run_of(trained)
    assert (run.name, run.model.recompute) == ("h200_gpt_8.3b_20_steps", "auto") and "optimizer.moments=bf16" in trained


def test_every_comparison_is_at_the_recipes_batch(tmp_path) -> None:
    (tmp_path / "model.py").write_text("class GPT: ...\nclass GPTConfig: ...\n")
    found = [words for _, words in commands("a", "b", "d", NANOGPT=str(tmp_path / "model.py"))]
    benches = [bench_of(words) for script, *words in found if script == "analysis/benchmarks/bench.py"]
    rows = [bench for bench in benches if not bench.trace]
    assert len(rows) == 14
    for bench in rows:
        recipe = composed_run(f"model={bench.model['name']}")
        assert bench.step_sequences == recipe.global_batch_size == BATCH[bench.model["family"]]
        assert (bench.accelerator, bench.peak_tflops_per_s) == ("gpu", 790)
    small = [words for _, words in commands("a5", "b", CARD="h100")]  # whose micro-batch of gpt_1.2b is smaller
    assert {bench_of(words[1:]).step_sequences for words in small if words[0].endswith("bench.py")} == {512, 1024}


def test_list_c_is_figure_7_at_its_true_widths_and_each_run_continues_its_own_folder() -> None:
    found = commands("c", SEED="7")
    runs = [run_of(words[1:]) for _, words in found]
    assert [(run.model.name, str(run.model.norm_order), run.seed) for run in runs] == [
        (model, order, 7) for model in ("bert_336m", "bert_752m") for order in ("pre", "post")
    ]
    assert {limit for limit, _ in found} == {490 + 40}  # 40 s to save a checkpoint
    for run, (_, words) in zip(runs, found, strict=True):
        assert run.resume.path == "auto" and f"hydra.run.dir=outputs/h200/{run.name}" in words
        assert (run.trainer.max_steps, run.global_batch_size * run.data.seq_length) == (2_000, 16_384)
    again = subprocess.run(
        ["bash", str(SCRIPT), "c1"], env=os.environ | {"DRY_RUN": "1", "FORCE": "1"}, capture_output=True, text=True
    )
    assert again.stdout.startswith("rm -rf outputs/h200/h200_fig7_bert_336m_pre_seed_1234")


def test_list_e_composes_for_eight_gpus() -> None:
    found = {words[0]: words[1:] for _, words in commands("e4")}
    plan = PlanConfig.from_dict(composed("plan", *found["src/plan.py"]))
    assert (plan.model.name, plan.measure, plan.num_devices, plan.cluster.name) == ("gpt_8.3b", 4, 8, "h200")
    runs = [run_of(words[1:]) for _, words in commands("e1", "e2", "e3", "e5", "e6")]
    layouts = [(run.model.name, run.parallel.layout()) for run in runs]
    assert layouts == [
        ("gpt_1.2b", Layout()),
        ("gpt_2.5b", Layout(tp_size=2)),
        ("gpt_4.2b", Layout(tp_size=4)),
        ("gpt_8.3b", Layout(tp_size=8)),
        ("gpt_1.2b", Layout(dp_size=8)),
        ("gpt_1.2b", Layout(dp_size=8, zero1=True)),
        ("gpt_8.3b", Layout(tp_size=4, pp_size=2)),
    ]
    assert {(run.micro_batch_size, run.global_batch_size, run.model.recompute) for run in runs[:4]} == {(8, 8, "full")}


def test_every_part_ends_within_nine_minutes_and_record_names_are_unique(tmp_path) -> None:
    (tmp_path / "model.py").write_text("class GPT: ...\nclass GPTConfig: ...\n")
    cells = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    minutes = {part: int(count) for part, _, count, _ in cells[1:]}  # after the titles
    assert list(minutes) == PARTS
    assert sum(count for part, count in minutes.items() if part[0] == "a") == 45
    assert sum(minutes[part] for part in PARTS[:5]) < 30 and sum(minutes[part] for part in PARTS[5:9]) < 30
    records = []
    for part in PARTS:
        found = commands(part, NANOGPT=str(tmp_path / "model.py"))
        limit = sum(limit for limit, _ in found)
        assert 60 * minutes[part] <= limit <= 9 * 60 - 10, part  # 10 s for installing wheels and imports
        records += [
            word for _, words in found for word in words if word.endswith((".json", ".xml")) or "run.dir=" in word
        ]
    assert len(set(records)) == len(records) == 41


def test_the_rehearsal_composes_every_command_with_tiny_models_on_a_cpu() -> None:
    for _, (script, *words) in commands("a", "b", "c", "d", REHEARSE="1"):
        assert not any(word.startswith(("analysis/benchmarks/records", "record=analysis")) for word in words)
        if script == "src/train.py":
            run = run_of(words)
            assert (run.trainer.accelerator, run.model.hidden_size) == ("cpu", 64) and run.trainer.max_steps <= 50
        elif script == "analysis/benchmarks/bench.py":
            bench = bench_of(words)
            assert (bench.accelerator, bench.model["num_layers"], bench.rounds) == ("cpu", 2, 1)
        elif script != "-m":
            assert words[words.index("--accelerator") + 1] == "cpu"


def run_script(*parts: str, **changes: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | changes
    return subprocess.run(["bash", str(SCRIPT), *parts], env=environment, capture_output=True, text=True)


def test_unknown_parts_and_cards_are_refused_before_anything_runs() -> None:
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2 and "some parts" in done.stdout and done.stdout.count("\n| ") > len(PARTS)
    done = subprocess.run(["bash", str(SCRIPT), "a1", "a10"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: a part must be one of {' '.join(PARTS)}, but is a10\n"
    done = run_script("a1", CARD="h20", DRY_RUN="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: `CARD` must be one of h200, h100, a100, v100, but is h20\n"


def fake_python(folder: Path, code: int, card: str = "h200 139.80") -> str:
    """A stub interpreter on a machine with one `card`: it writes the record on success, and exits with `code`."""
    path = folder / "python"
    path.write_text(
        f"#!/usr/bin/env bash\ncase $1 in */h200_rows.py) [ $2 != card ] || echo {card}; exit 0 ;; esac\n"
        f"case $1$2 in */forecast.pyfits) exec {sys.executable} $@ ;; esac\necho ran\n"
        f'for word; do case $word in record=*) [ {code} -ne 0 ] || echo "{{}}" > "${{word#record=}}" ;; esac; done\n'
        f"exit {code}\n"
    )
    path.chmod(0o755)
    return str(path)


def test_a_failure_is_one_line_the_next_part_runs_and_the_exit_code_is_set(tmp_path) -> None:
    folders = {"RESULTS": str(tmp_path / "results"), "LOGS": str(tmp_path / "logs"), "OUT": str(tmp_path / "out")}
    done = run_script("a5", "d2", **folders | {"PYTHON": fake_python(tmp_path, 3), "WHEELS": ""})
    assert done.returncode == 1
    names = ("h200_gpt_1.2b_bf16_batch_512", "h200_bert_336m_bf16_batch_1024", "h200_bert_3.9b_bf16_batch_1024")
    assert [line for line in done.stdout.splitlines() if "not measured" in line] == [
        f"{name}: not measured, exit code 3; see {tmp_path}/logs/{name}.log" for name in names
    ]
    assert done.stdout.count("since the start") == 2
    with tarfile.open(tmp_path / "out" / "h200_a5_d2.tar.gz") as archive:  # the logs have the reason
        assert {Path(name).name for name in archive.getnames()} >= {f"{name}.log" for name in names}


def test_an_existing_record_is_kept_unless_forced(tmp_path) -> None:
    folders = {"RESULTS": str(tmp_path / "results"), "LOGS": str(tmp_path / "logs"), "OUT": str(tmp_path / "out")}
    settings = folders | {"PYTHON": fake_python(tmp_path, 0), "WHEELS": ""}
    again = "the record is there already"
    for changes, skipped in (({}, False), ({}, True), ({"FORCE": "1"}, False)):
        done = run_script("d2", **settings | changes)
        assert done.returncode == 0, done.stdout + done.stderr
        # The comparison with the forecast runs at the end in any case.
        assert (again in done.stdout, done.stdout.splitlines().count("ran")) == (skipped, 1 if skipped else 2)
        with tarfile.open(tmp_path / "out" / "h200_d2.tar.gz") as archive:
            assert "./analysis/benchmarks/records/h200_bert_3.9b_bf16_batch_1024.json" in archive.getnames()


def test_what_does_not_fit_the_machines_card_is_left_out_with_its_bytes(tmp_path) -> None:
    folders = {"RESULTS": str(tmp_path / "results"), "LOGS": str(tmp_path / "logs")}
    done = run_script("a6", "d7", **folders | {"PYTHON": fake_python(tmp_path, 0, "h100 79.10"), "WHEELS": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("== ")]
    assert [line for line in lines if "left out" in line] == [
        "h100_gpt_8.3b_20_steps: left out, needs 111.9 GiB, and the h100 has 79.1",
    ]
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        f"h100_gpt_2.5b_{dtype}_batch_512.json" for dtype in ("fp8", "bf16")
    }


def test_a_row_whose_kernel_is_not_installed_is_left_out_in_a_line(tmp_path) -> None:
    """Not a failure: the stub interpreter ends with 3 for whatever it runs, so also for the import."""
    folders = {"RESULTS": str(tmp_path / "results"), "LOGS": str(tmp_path / "logs")}
    python = fake_python(tmp_path, 3)
    done = run_script("b2", **folders | {"PYTHON": python, "WHEELS": ""})
    found = [line for line in done.stdout.splitlines() if "not measured" in line]
    assert found == [
        f"gpt_1.2b with FlashAttention-3: not measured, {python} has no flash_attn_interface",
        f"h200_gpt_2.5b_without_dropout_cudnn: not measured, exit code 3; see {tmp_path}/logs/"
        "h200_gpt_2.5b_without_dropout_cudnn.log",
    ]


def test_a_machine_without_the_card_is_refused_before_anything_runs(tmp_path) -> None:
    (tmp_path / "python").write_text("#!/usr/bin/env bash\n[ $2 = imports ] || { echo 'error: no' >&2; exit 2; }\n")
    (tmp_path / "python").chmod(0o755)
    done = run_script("a5", PYTHON=str(tmp_path / "python"), RESULTS=str(tmp_path), LOGS=str(tmp_path), WHEELS="")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: no\n")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lists_a_and_b_are_rehearsed_end_to_end_on_a_cpu(tmp_path) -> None:
    folders = {"LOGS": str(tmp_path / "logs"), "RESULTS": str(tmp_path / "results"), "OUT": str(tmp_path / "out")}
    done = run_script("a", "b", REHEARSE="1", **folders)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured" not in done.stdout + done.stderr and "over 3 seeds" in done.stdout
    paths = (tmp_path / "results").glob("*.json")
    records = {path.stem.removeprefix("rehearsal_"): json.loads(path.read_text()) for path in paths}
    runs = [f"2.5b_{run}" for run in ("fp8_seed_1234", *(f"bf16_seed_{seed}" for seed in (1234, 1235, 1236)))]
    assert set(records) == {
        *(f"trace_{model}" for model in ("gpt_1.2b", "bert_336m", "gpt_2.5b")),
        *("attention_backends", "products_bf16", "products_fp8", "jobs", "gpu_tests_attention", *runs),
        *("gpt_1.2b_bf16_batch_512", "bert_336m_bf16_batch_1024", "gpt_2.5b_fp8_batch_512", "gpt_2.5b_bf16_batch_512"),
        *(f"gpt_1.2b_without_dropout_{attention}" for attention in ("flash", "cudnn", "flash3")),
        "gpt_2.5b_without_dropout_cudnn",
    }
    trace = records["trace_gpt_1.2b"]
    # Of a layer, the passes over the logits, the counters of the optimizer, and AdamW for all tensors.
    assert trace["metrics"]["graphs"]["value"] == 6 and trace["graph_breaks"] == {}
    assert trace["syncs"]["aten::_local_scalar_dense"] > 0  # the optimizer reads the gradient norm
    rows = {(row["phase"], *row["operations"]): row["launches"] for row in trace["operations"]}
    assert rows["forward", "QKV"] > 0 and rows["optimizer", "AdamW"] > 0
    attention = records["attention_backends"]["metrics"]
    assert attention["bert_336m/error/math"]["value"] < 1e-2 and attention["gpt_1.2b/dropout_0.1/math"]["value"] > 0
    assert {name.split("/")[2] for name in records["products_fp8"]["metrics"]} == {"bf16", "fp8_fast", "fp8_wide"}
    assert all(records[name]["metrics"]["train/step"]["value"] > 0 for name in runs)
    jobs = records["jobs"]["metrics"]
    assert max(jobs[f"{job}/gap"]["value"] for job in ("finetune", "zero_shot", "generate")) == 0
    assert jobs["background_saves"]["value"] == 4
    (archive,) = (tmp_path / "out").iterdir()
    with tarfile.open(archive) as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert {f"rehearsal_{name}.json" for name in records} | {"rehearsal_trace_gpt_1.2b.trace.json.gz"} <= names
    assert archive.stat().st_size < 16 * 2**20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lists_d_and_e_are_rehearsed_on_two_cpu_ranks_and_fill_figure_5(tmp_path) -> None:
    parts = ("d1", "d2", "d3", "d7", "e")
    done = run_script(*parts, REHEARSE="1", LOGS=str(tmp_path / "logs"), RESULTS=str(tmp_path / "results"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured" not in done.stdout + done.stderr
    paths = (tmp_path / "results").glob("*.json")
    records = {path.stem.removeprefix("rehearsal_"): json.loads(path.read_text()) for path in paths}
    weak = [f"weak_gpt_{size}" for size in ("1.2b", "2.5b", "4.2b", "8.3b")]
    trained = {*weak, "gpt_1.2b_dp_8", "gpt_1.2b_dp_8_zero1", "gpt_8.3b_pp_2", "gpt_8.3b_20_steps"}
    rows = {"bert_3.9b_bf16_batch_1024", "gpt_355m_bf16_batch_512", "gpt_355m_bf16_batch_512_cuda_graphs"}
    assert set(records) == trained | rows | {"machine", "gpu_tests", "layouts_gpt_8.3b", "figure_5"}
    assert records["figure_5"]["metrics"]["figure_5/mp/1_gpu"]["value"] == 100
    for name in trained:
        assert {f"train/{part}" for part in ("step", "forward", "backward", "optimizer")} <= set(
            records[name]["metrics"]
        )


@pytest.mark.slow
def test_list_c_is_rehearsed_end_to_end_on_a_cpu_and_continues_a_run_that_was_stopped(tmp_path) -> None:
    folders = {"LOGS": str(tmp_path / "logs"), "RESULTS": str(tmp_path), "OUT": str(tmp_path / "out")}
    _, stopped = commands("c3", REHEARSE="1", **folders)[0]
    stopped += ["trainer.stop_after_steps=20", "checkpoint.save_last=true"]
    subprocess.run([sys.executable, *stopped], cwd=ROOT, check=True, capture_output=True)
    run_folder = tmp_path / "logs" / "rehearsal_fig7_bert_752m_pre_seed_1234"
    assert (run_folder / "checkpoints" / "step_20.ckpt").is_dir()
    done = run_script("c", REHEARSE="1", **folders)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "not measured" not in done.stdout
        and "resumed from" in (tmp_path / "logs" / f"{run_folder.name}.log").read_text()
    )
    assert not (run_folder / "checkpoints").exists()
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [record["config"]["name"] for record in records] == [
        f"bert_{size}m_{order}" for size in (336, 752) for order in ("post", "pre")
    ]
    assert [record["metrics"]["steps"]["value"] for record in records] == [50] * 4
    curves = read_curves(records)
    assert len(draw_true_widths(curves, read_cells(records)).axes) == 2 and curves["loss"].max() < 9
    with tarfile.open(tmp_path / "out" / "rehearsal_c1_c2_c3_c4.tar.gz") as archive:
        names = archive.getnames()
    assert [sum(name.endswith(end) for name in names) for end in (".json", "/metrics.csv")] == [4, 4]
