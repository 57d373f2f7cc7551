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
from analysis.norm_order.cells import read_cells, read_curves
from analysis.norm_order.figure import draw_true_widths
from lmscale.config import Layout
from lmscale.config.plan import PlanConfig
from lmscale.config.pretrain import RunConfig
from lmscale.models.attention_backend import BACKENDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "analysis" / "benchmarks" / "h200.sh"
PARTS = [f"a{number}" for number in range(1, 6)] + [f"b{number}" for number in range(1, 11)]
PARTS += [f"c{number}" for number in range(1, 5)] + ["d1", "d2", "d3"] + [f"e{number}" for number in range(1, 7)]


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


def test_list_a_has_correctness_a_trace_and_three_models() -> None:
    found = [words for _, words in commands("a")]
    assert found == [words for part in ("a1", "a2", "a3", "a4", "a5") for _, words in commands(part)]
    assert [words[0] for words in found] == [
        *(
            "analysis/benchmarks/gpu/gpu_facts.py",
            "-m",
            "analysis/benchmarks/bench.py",
            "analysis/benchmarks/gpu/attention_backends.py",
        ),
        *["analysis/benchmarks/bench.py"] * 4,
    ]
    tests = [Path(word) for word in found[1] if word.startswith("tests/")]
    marked = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__) and "pytest.mark.gpu" in path.read_text()
    }
    assert set(tests) == marked
    assert found[1][1:4] == ["pytest", "-m", "gpu"]
    benches = [bench_of(words[1:]) for words in (found[2], *found[4:])]
    assert [bench.trace for bench in benches] == [True] + [False] * 4
    assert [(b.model["name"], b.micro_batch_size, b.cuda_graphs) for b in benches] == [
        *(("gpt_1.2b", 16, False), ("gpt_1.2b", 32, False)),
        *(("bert_336m", 128, False), ("bert_336m", 128, True), ("bert_3.9b", 24, False)),
    ]
    assert {(b.accelerator, b.precision.dtype, b.peak_tflops_per_s, *b.peers) for b in benches[1:]} == {
        ("gpu", "bf16", 790)
    }


def test_the_attention_shapes_match_the_models() -> None:
    words = commands("a2")[1][1]
    texts = words[words.index("--shape") + 1 : words.index("--backends")]
    assert words[words.index("--backends") + 1 : words.index("--accelerator")] == list(BACKENDS)
    for text in texts:
        shape = AttentionShape.parse(text)
        name, _, tp_size = shape.name.partition("_tp_")
        config = bench_of([f"model={name}", "peers=[]"]).transformer_config()
        assert (shape.n * int(tp_size or 1), shape.s, shape.d) == (
            config.num_attention_heads,
            config.max_position_embeddings,
            config.head_size,
        )
        assert shape.causal == (config.family == "gpt")


def test_list_b_composes_into_typed_configurations(tmp_path) -> None:
    (tmp_path / "model.py").write_text("class GPT: ...\nclass GPTConfig: ...\n")
    found = [words for _, words in commands("b", NANOGPT=str(tmp_path / "model.py"))]
    benches = [bench_of(words) for script, *words in found if script == "analysis/benchmarks/bench.py"]
    assert [(b.model["name"], b.cuda_graphs, b.precision.dtype, *b.peers) for b in benches] == [
        *(("gpt_355m", False, "bf16"), ("gpt_355m", True, "bf16")),
        *(("gpt_355m", False, "bf16", peer) for peer in ("hf_compiled", "file_compiled", "megatron_core")),
        ("gpt_2.5b", False, "fp8", "ours_bf16"),
    ]
    trains = [words for script, *words in found if script == "src/train.py"]
    assert len(found) == len(benches) + len(trains)
    runs = []
    for words in trains:
        runs.append(run_of(words))
    assert [(run.name, run.precision.dtype, run.trainer.max_steps) for run in runs] == [
        ("h200_gpt_8.3b_20_steps", "bf16", 20),
        ("h200_2.5b_fp8_seed_1234", "fp8", 200),
        *((f"h200_2.5b_bf16_seed_{seed}", "bf16", 200) for seed in (1234, 1235, 1236)),
    ]
    assert runs[0].model.recompute == "auto" and "optimizer.moments=bf16" in trains[0]


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


def test_lists_d_and_e_compose_for_one_gpu_and_for_eight() -> None:
    jobs, trained, *alone = (words for _, words in commands("d"))
    assert jobs[:1] == ["analysis/benchmarks/gpu/jobs.py"] and jobs[-4:-2] == ["--accelerator", "gpu"]
    bench, run = bench_of(commands("a3")[0][1][1:]), run_of(trained[1:])
    assert (run.model.name, run.micro_batch_size, run.global_batch_size) == ("gpt_1.2b", bench.micro_batch_size, 32)
    benches = [bench_of(words[1:]) for words in alone]
    assert [(b.precision.dtype, b.micro_batch_size, b.peers) for b in benches] == [("fp8", 8, []), ("bf16", 8, [])]
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
    records = []
    for part in PARTS:
        found = commands(part, NANOGPT=str(tmp_path / "model.py"))
        assert 0 < sum(limit for limit, _ in found) <= 9 * 60 - 10, part  # 10 s for installing wheels and imports
        records += [
            word for _, words in found for word in words if word.endswith((".json", ".xml")) or "run.dir=" in word
        ]
    assert len(set(records)) == len(records) == 35


def test_the_rehearsal_composes_every_command_with_tiny_models_on_a_cpu() -> None:
    for _, (script, *words) in commands("a", "b", "c", REHEARSE="1"):
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
    assert done.returncode == 2 and "some parts" in done.stdout
    done = subprocess.run(["bash", str(SCRIPT), "a1", "a6"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: a part must be one of {' '.join(PARTS)}, but is a6\n"
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
    done = run_script("a4", "a5", **folders | {"PYTHON": fake_python(tmp_path, 3), "WHEELS": ""})
    assert done.returncode == 1
    names = ("h200_bert_336m", "h200_bert_336m_cuda_graphs", "h200_bert_3.9b")
    assert [line for line in done.stdout.splitlines() if "not measured" in line] == [
        f"{name}: not measured, exit code 3; see {tmp_path}/logs/{name}.log" for name in names
    ]
    assert done.stdout.count("since the start") == 2
    with tarfile.open(tmp_path / "out" / "h200_a4_a5.tar.gz") as archive:  # the logs have the reason
        assert {Path(name).name for name in archive.getnames()} >= {f"{name}.log" for name in names}


def test_an_existing_record_is_kept_unless_forced(tmp_path) -> None:
    folders = {"RESULTS": str(tmp_path / "results"), "LOGS": str(tmp_path / "logs"), "OUT": str(tmp_path / "out")}
    settings = folders | {"PYTHON": fake_python(tmp_path, 0), "WHEELS": ""}
    again = "the record is there already"
    for changes, skipped in (({}, False), ({}, True), ({"FORCE": "1"}, False)):
        done = run_script("a5", **settings | changes)
        assert done.returncode == 0, done.stdout + done.stderr
        # The comparison with the forecast runs at the end in any case.
        assert (again in done.stdout, done.stdout.splitlines().count("ran")) == (skipped, 1 if skipped else 2)
        with tarfile.open(tmp_path / "out" / "h200_a5.tar.gz") as archive:
            assert "./analysis/benchmarks/records/h200_bert_3.9b.json" in archive.getnames()


def test_what_does_not_fit_the_machines_card_is_left_out_with_its_bytes(tmp_path) -> None:
    folders = {"RESULTS": str(tmp_path / "results"), "LOGS": str(tmp_path / "logs")}
    done = run_script("b5", "b6", "d3", **folders | {"PYTHON": fake_python(tmp_path, 0, "h100 79.10"), "WHEELS": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("== ")]
    assert [line for line in lines if "left out" in line] == [
        "h100_gpt_8.3b_20_steps: left out, needs 111.9 GiB, and the h100 has 79.1",
        "h100_fp8: left out, needs 111.7 GiB, and the h100 has 79.1",
    ]
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"h100_fp8_alone.json", "h100_bf16_alone.json"}


def test_a_machine_without_the_card_is_refused_before_anything_runs(tmp_path) -> None:
    (tmp_path / "python").write_text("#!/usr/bin/env bash\n[ $2 = imports ] || { echo 'error: no' >&2; exit 2; }\n")
    (tmp_path / "python").chmod(0o755)
    done = run_script("a3", PYTHON=str(tmp_path / "python"), RESULTS=str(tmp_path), LOGS=str(tmp_path), WHEELS="")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: no\n")


@pytest.mark.slow
def test_list_a_is_rehearsed_end_to_end_on_a_cpu(tmp_path) -> None:
    done = run_script(
        "a", REHEARSE="1", LOGS=str(tmp_path / "logs"), RESULTS=str(tmp_path / "results"), OUT=str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured" not in done.stdout and "not measured" not in done.stderr
    records = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    assert set(records) == {
        f"rehearsal_{name}"
        for name in (
            *("machine", "gpu_tests", "trace_gpt_1.2b", "attention_backends"),
            *("gpt_1.2b", "bert_336m", "bert_336m_cuda_graphs", "bert_3.9b"),
        )
    }
    trace = records["rehearsal_trace_gpt_1.2b"]
    # Of a layer, the passes over the logits, the counters of the optimizer, and AdamW for all tensors.
    assert trace["metrics"]["graphs"]["value"] == 6 and trace["graph_breaks"] == {}
    assert trace["syncs"]["aten::_local_scalar_dense"] > 0  # the optimizer reads the gradient norm
    rows = {(row["phase"], *row["operations"]): row["launches"] for row in trace["operations"]}
    assert rows["forward", "QKV"] > 0 and rows["optimizer", "AdamW"] > 0
    attention = records["rehearsal_attention_backends"]["metrics"]
    assert attention["bert_336m/error/math"]["value"] < 1e-2 and attention["gpt_1.2b/dropout_0.1/math"]["value"] > 0
    (archive,) = (tmp_path / "out").iterdir()
    with tarfile.open(archive) as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert {f"{name}.json" for name in records} | {
        "rehearsal_trace_gpt_1.2b.trace.json.gz",
        "rehearsal_gpu_tests.xml",
    } <= names
    assert archive.stat().st_size < 16 * 2**20


@pytest.mark.slow
def test_trained_and_float8_rows_of_list_b_are_rehearsed_on_a_cpu(tmp_path) -> None:
    folders = {"LOGS": str(tmp_path / "logs"), "RESULTS": str(tmp_path)}
    done = run_script("b5", "b6", "b7", "b8", "b9", "b10", REHEARSE="1", **folders)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured" not in done.stdout + done.stderr and "over 3 seeds" in done.stdout
    records = {path.stem: json.loads(path.read_text())["metrics"] for path in tmp_path.glob("*.json")}
    runs = [f"rehearsal_2.5b_{run}" for run in ("fp8_seed_1234", *(f"bf16_seed_{seed}" for seed in (1234, 1235, 1236)))]
    assert set(records) == {"rehearsal_gpt_8.3b_20_steps", "rehearsal_fp8", *runs}
    assert all(records[name]["train/step"]["value"] > 0 for name in ("rehearsal_gpt_8.3b_20_steps", *runs))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lists_d_and_e_are_rehearsed_on_two_cpu_ranks_and_fill_figure_5(tmp_path) -> None:
    done = run_script("d", "e", REHEARSE="1", LOGS=str(tmp_path / "logs"), RESULTS=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured" not in done.stdout + done.stderr
    records = {path.stem.removeprefix("rehearsal_"): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    weak = [f"weak_gpt_{size}" for size in ("1.2b", "2.5b", "4.2b", "8.3b")]
    trained = {"gpt_1.2b_train", *weak, "gpt_1.2b_dp_8", "gpt_1.2b_dp_8_zero1", "gpt_8.3b_pp_2"}
    assert set(records) == trained | {"jobs", "fp8_alone", "bf16_alone", "layouts_gpt_8.3b", "figure_5"}
    assert max(records["jobs"]["metrics"][f"{job}/gap"]["value"] for job in ("finetune", "zero_shot", "generate")) == 0
    assert records["jobs"]["metrics"]["background_saves"]["value"] == 4
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
