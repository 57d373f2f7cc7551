"""The comparison of training steps: equal work, equal losses, one-line errors."""

import importlib.util
import json
import subprocess

import pytest
import torch
import warm
from entry_points import REPOSITORY, environment, refuse
from sharding import compiler

from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.peers.contender import make_batches
from analysis.benchmarks.peers.megatron import has_softmax_kernel
from analysis.benchmarks.peers.ours import Ours
from analysis.benchmarks.race import LossesDifferError, Racer, make_contender, race
from lmscale.planner.flops import model_flops_per_step

CPU = torch.device("cpu")
SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 300,
    "vocab_multiple": 4,
    "max_position_embeddings": 24,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
NANO = '''
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 8
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 8
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    """A bigram model with nanoGPT's interface."""
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens, targets=None):
        logits = self.table(tokens)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
'''


def bench_of(architecture: str = "gpt", **changes) -> BenchConfig:
    values = {
        "model": {"family": architecture, **SIZES},
        "precision": {"dtype": "fp32"},
        "micro_batch_size": 3,
        "compiles": False,
        "rounds": 2,
        "steps_per_round": 2,
        "warm_up_steps": 1,
        "lr": 1e-3,
        "accelerator": "cpu",
        "num_threads": 1,
    }
    return BenchConfig.from_dict(values | changes)


def values_of(record: dict) -> dict[str, float]:
    return {name: entry["value"] for name, entry in record["metrics"].items()}


@pytest.mark.parametrize(
    "architecture, peers",
    [
        ("gpt", ["hf_eager"]),
        ("bert", ["hf_eager"]),
        pytest.param("gpt", ["hf_eager", "hf_compiled"], marks=pytest.mark.slow),
    ],
)
def test_all_train_on_the_same_batches_with_the_same_losses(architecture: str, peers: list[str]) -> None:
    found = values_of(race(bench_of(architecture, peers=peers, max_loss_difference=5e-4)))
    for peer in peers:
        assert found[f"{peer}/loss"] == pytest.approx(found["ours/loss"], rel=1e-4)
        assert found[f"{peer}/ratio"] == pytest.approx(found[f"{peer}/step"] / found["ours/step"])
    assert found["ours/step_least"] <= found["ours/step_p10"] <= found["ours/step"] <= found["ours/step_p90"]


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_with_a_teacher_all_have_the_same_losses(architecture: str) -> None:
    teacher = {"family": architecture, **SIZES, "num_layers": 3, "hidden_size": 48}
    record = race(bench_of(architecture, teacher=teacher, peers=["hf_eager"], max_loss_difference=5e-4))
    alone = race(bench_of(architecture, peers=["hf_eager"]))
    losses = [found["metrics"]["ours/loss"]["value"] for found in (record, alone)]
    assert losses[0] < losses[1]


def test_a_compiled_peer_is_compiled_and_has_the_loss_of_the_eager_one() -> None:
    """With another backend; Inductor takes 20 s to generate code."""
    bench = bench_of()
    (batches,) = make_batches(bench.transformer_config(), bench, 1, CPU)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with compiler("eager"):
        losses = [float(make_contender(name, bench, CPU).step(batches, 0)) for name in ("hf_eager", "hf_compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_bf16_stays_within_the_bound_of_losses() -> None:
    race(bench_of(peers=["hf_eager"], precision={"dtype": "bf16"}, max_loss_difference=2e-3))


def test_float8_has_nearly_the_loss_of_bf16_and_shares_use_the_given_peak() -> None:
    changes = {"peers": [], "micro_batch_size": 4, "peak_tflops_per_s": 2.0}
    in_bf16, found = (values_of(race(bench_of(precision={"dtype": name}, **changes))) for name in ("bf16", "fp8"))
    assert found["ours/loss"] == pytest.approx(in_bf16["ours/loss"], rel=5e-3)
    assert found["ours/loss"] != in_bf16["ours/loss"]
    share = found["ours/model_flops_per_s"] / 2e12
    assert found["ours/share_of_given_peak"] == pytest.approx(share)
    assert "ours/ratio" not in values_of(race(bench_of(peers=[])))


def test_a_model_file_is_a_peer_and_one_with_other_losses_is_refused(tmp_path) -> None:
    path = tmp_path / "model.py"
    path.write_text(NANO)
    found = values_of(race(bench_of(peers=["file_eager"], file=str(path), max_loss_difference=0.5)))
    assert found["file_eager/loss"] > 0
    with pytest.raises(
        LossesDifferError, match="`max_loss_difference` must be .* for file_eager, whose mean loss"
    ) as caught:
        race(bench_of(peers=["file_eager"], file=str(path), max_loss_difference=1e-6))
    assert values_of(caught.value.record)["file_eager/step"] > 0


@pytest.mark.parametrize(
    "failure, message",
    [
        ("raise ValueError('no such table')", "no such table"),
        ("raise type('Local', (Exception,), {})('no such row')", "file_eager: .*no such row"),
        ("import os; os._exit(7)", "file_eager ended with exit code 7"),
    ],
)
def test_a_contender_that_fails_in_its_process_ends_the_race(tmp_path, failure: str, message: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(NANO.replace("logits = self.table(tokens)", failure))
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){message}"):
        race(bench_of(peers=["file_eager"], file=str(path)))


def test_a_contender_that_was_killed_while_it_waited_is_named_by_its_exit_code() -> None:
    racer = Racer("ours", bench_of())
    racer.run(1)
    racer.process.kill()
    racer.process.join()
    with pytest.raises(RuntimeError, match="ours ended with exit code -9"):
        racer.run(1)
    racer.close()


def test_a_contender_ends_by_itself_when_its_pipe_is_closed() -> None:
    racer = Racer("ours", bench_of())
    racer.run(1)
    racer.close()
    assert racer.process.exitcode == 0


@pytest.mark.slow
def test_peers_of_float8_compute_in_bf16() -> None:
    changes = {"peers": [], "micro_batch_size": 4}
    in_types = {name: bench_of(precision={"dtype": name}, **changes).peers_dtype for name in ("fp32", "bf16", "fp8")}
    assert in_types == {"fp32": "fp32", "bf16": "bf16", "fp8": "bf16"}


@pytest.mark.parametrize("missing", [None, "scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"])
def test_megatrons_fused_softmax_needs_both_of_apexs_kernels(missing, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else "there")
    assert has_softmax_kernel() is (missing is None)


@pytest.mark.parametrize("name", ["ours", "hf_eager", "file_eager"])
def test_a_step_of_several_micro_batches_adds_their_gradients_and_updates_once(name: str, tmp_path) -> None:
    (tmp_path / "model.py").write_text(NANO)
    changes = {"peers": ["file_eager"], "file": str(tmp_path / "model.py")}
    whole, cut = (bench_of(micro_batch_size=b, global_batch_size=6, **changes) for b in (6, 2))
    drawn = [make_batches(bench.transformer_config(), bench, 1, CPU)[0] for bench in (whole, cut)]
    assert [len(batches) for batches in drawn] == [1, 3]
    torch.testing.assert_close(torch.cat([batch["tokens"] for batch in drawn[1]]), drawn[0][0]["tokens"])
    found = []
    for bench, batches in zip((whole, cut), drawn, strict=True):
        contender = make_contender(name, bench, CPU)
        forwards, updates = [], []
        contender.model.register_forward_pre_hook(lambda *_, calls=forwards: calls.append(1))
        contender.optimizer.register_step_pre_hook(lambda *_, calls=updates: calls.append(1))
        losses = [float(contender.step(batches, number)) for number in range(3)]
        assert (len(forwards), len(updates)) == (3 * len(batches), 3)
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_rates_count_all_micro_batches_of_a_step() -> None:
    found = values_of(race(bench_of(peers=[], global_batch_size=12)))
    assert found["ours/tokens_per_s"] * found["ours/step"] == pytest.approx(12 * 24)
    flops = model_flops_per_step(bench_of().transformer_config(), 24, 12)
    assert found["ours/model_flops_per_s"] * found["ours/step"] == pytest.approx(flops)


def test_a_peer_that_is_not_installed_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "megatron.core", None)
    with pytest.raises(ValueError, match="`peers` must not contain megatron_core if it is not installed"):
        make_contender("megatron_core", bench_of(), CPU)


def test_our_step_trains() -> None:
    bench = bench_of(lr=1e-2)
    ours = Ours(bench, CPU)
    (batches,) = make_batches(bench.transformer_config(), bench, 1, CPU)
    losses = [float(ours.step(batches, number)) for number in range(20)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    "changes, message",
    [
        (["peers=[nobody]"], "`peers` must be some of hf_eager"),
        (["peers=[file_compiled]"], "`file` must be given if and only if `peers` contains"),
        (["peers=[file_compiled]", "file=/nowhere.py"], "`file` must be a file, but /nowhere.py is not"),
        (["peers=[file_compiled]", f"file={__file__}"], "`file` must define GPT and GPTConfig"),
        (["peers=[file_compiled]", "file=README.md"], "`file` must be a Python file, but README.md is not"),
        (["peers=[hf_eager,hf_eager]"], "`peers` must not contain duplicates"),
        (["trace=true"], "`peers` must be [] with trace=true, which covers only our step, but is ['hf_compiled']"),
        (["trace=true", "peers=[]"], "`record` must be a file with trace=true, but is null"),
        (["accelerator=tpu"], "`accelerator` must be one of auto, cpu, gpu, but is 'tpu'"),
        (["lr=0"], "`lr` must be above 0, but is 0.0"),
        (["max_loss_difference=-1"], "`max_loss_difference` must be at least 0, but is -1.0"),
        (["record=README.md/bench.json"], "`record` must be in a folder that can be made"),
        (["record=analysis"], "`record` must be a file, but analysis is a folder"),
        (["precision=fp16"], "`precision` must be fp32, bf16 or fp8 for a comparison"),
        (["cuda_graphs=true"], "`cuda_graphs` must be false unless compiles=true and precision=bf16 or fp8"),
        (["cuda_graphs=true", "precision=bf16"], "`cuda_graphs` must be false on a CPU"),
        (["peak_tflops_per_s=0"], "`peak_tflops_per_s` must be above 0"),
        (["model=bert_tiny", "peers=[megatron_core]"], "`peers` of a BERT must be hf_eager or hf_compiled"),
        (["seq_length=4096"], "`seq_length` must be at most `model.max_position_embeddings` (128)"),
        (["global_batch_size=12"], "`global_batch_size` must be a multiple of `micro_batch_size` (8), but is 12"),
        (["rounds=0"], "`rounds` must be a whole number of at least 1"),
        (["num_threads=100000"], "`num_threads` must be at most the"),
        (["seed=-1"], "`seed` must be at least 0 and below 2^63, but is -1"),
        (["seed=99999999999999999999999"], "`seed` must be at least 0 and below 2^63"),
        (["model.vocab_size=1"], "`model.vocab_size` must be at least 2, but is 1"),
        (["seq_length=1"], "`seq_length` must be at least 2, but is 1"),
        (["peers=hf_compiled"], "`peers` must be a list, but is 'hf_compiled'"),
        (
            ["precision=fp8", "model.hidden_size=24", "model.num_attention_heads=2"],
            "`model.hidden_size` must be a multiple of 16",
        ),
        (
            ["cuda_graphs=true", "precision=bf16", "model.recompute=full"],
            "`cuda_graphs` must be false with model.recomp",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(changes: list[str], message: str) -> None:
    done = refuse(REPOSITORY / "analysis" / "benchmarks" / "bench.py", *changes)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


def run_script(*changes: str) -> subprocess.CompletedProcess:
    """Compare with eager Hugging Face, one step each."""
    small = [f"model.{key}={value}" for key, value in SIZES.items()]
    numbers = ["rounds=1", "steps_per_round=1", "warm_up_steps=1", "compiles=false", "num_threads=1", "accelerator=cpu"]
    words = [str(REPOSITORY / "analysis" / "benchmarks" / "bench.py"), *small, *numbers, "peers=[hf_eager]", *changes]
    return warm.run(words, REPOSITORY, environment(), timeout=200)


def test_the_script_writes_a_record(tmp_path) -> None:
    path = tmp_path / "bench.json"
    done = run_script(f"record={path}")
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["metrics"]["hf_eager/ratio"]["unit"] == "their time / ours" and record["kind"] == "run"
    assert (record["config"]["model"]["attention"], record["attention"]) == ("auto", {"ours": "sdpa", "hf_eager": None})


def test_if_losses_differ_the_script_prints_the_times_and_writes_no_record(tmp_path) -> None:
    done = run_script("precision=bf16", "max_loss_difference=0", f"record={tmp_path / 'bench.json'}")
    assert done.returncode == 2 and "error: `max_loss_difference` must be at least" in done.stderr
    assert "hf_eager/ratio " in done.stdout and not list(tmp_path.iterdir())
