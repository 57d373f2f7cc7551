"""Mistakes that once passed every test, planted in a copy of the source: the named test now detects each."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from entry_points import environment

ROOT = Path(__file__).resolve().parents[2]
SEEDS, COUNTING = "tests/training/test_attention_seeds.py", "tests/training/test_counters.py"
UNIQUE = f"{SEEDS}::test_unique_seeds_give_every_rank_step_and_micro_step_its_own_mask"
MODULE, COUNTERS = "src/lmscale/training/step/training_module.py", "src/lmscale/training/step/counters.py"
SEED_CALL = "seed_rank_generator(self.seed, step, index, self.dropout_rank, {}, parallel.pp_rank)"
LOSS = "src/lmscale/parallel/chunked_cross_entropy.py"
SUMS = "tests/parallel/test_cross_entropy.py::test_gradients_of_half_weights_and_biases_are_summed_over_chunks_in_fp32"
# Name -> file, correct text, text with the mistake, the test that detects it. The first is a bug this project had.
CHANGES = {
    "tensor rank left out of the seed": (
        MODULE,
        SEED_CALL.format("parallel.tp_rank"),
        SEED_CALL.format("0"),
        UNIQUE,
    ),
    "data ranks share unique masks": (
        MODULE,
        'return 0 if self.dropout_seeds == "shared" else self.parallel.dp_rank',
        "return 0",
        UNIQUE,
    ),
    "micro-step left out of the seed": (
        MODULE,
        SEED_CALL.format("parallel.tp_rank"),
        SEED_CALL.format("parallel.tp_rank").replace("index", "0"),
        UNIQUE,
    ),
    "clip factor from the norm with the loss scale": (
        COUNTERS,
        "(max_grad_norm / (grad_norm + 1e-6))",
        "(max_grad_norm / (norm.norm + 1e-6))",
        f"{COUNTING}::test_clipping_compares_its_limit_with_the_norm_without_the_loss_scale",
    ),
    "hysteresis not restored on growth": (
        COUNTERS,
        "torch.where(grows, float(self.config.hysteresis), left), left - 1)",
        "left, left - 1)",
        f"{COUNTING}::test_growth_of_the_loss_scale_restores_the_hysteresis",
    ),
    "rate of the step instead of the update": (
        "src/lmscale/training/step/learning_rate.py",
        "self.optimizer.counters.known.num_updates + 1",
        "self.optimizer.counters.known.num_updates + self.optimizer.counters.known.num_skipped + 1",
        "tests/training/test_schedule.py::test_skipped_steps_do_not_advance_the_rate",
    ),
    "softmax in the half type": (
        "src/lmscale/models/attention.py",
        "scores.softmax(dim=-1, dtype=dtype)",
        "scores.softmax(dim=-1)",
        "tests/models/test_layer.py"
        "::test_exact_attention_of_half_types_keeps_its_probabilities_in_fp32_for_the_backward_pass",
    ),
    "weight's gradient summed in the half type": (
        LOSS,
        "return product.to(_wide(product.dtype)) if num_chunks > (1 if product.is_cuda else 2) else product",
        "return product",
        SUMS,
    ),
    "bias's gradient summed in the half type": (
        LOSS,
        "torch.zeros(bias.shape, dtype=wide, device=bias.device)",
        "torch.zeros_like(bias)",
        SUMS,
    ),
    "dropout of the head at the site of the last MLP": (
        "src/lmscale/finetune/heads.py",
        "1 + 3 * config.num_layers",
        "3 * config.num_layers",
        "tests/finetune/test_heads.py::test_the_dropout_of_the_head_has_the_site_after_those_of_all_layers",
    ),
    "both moments rounded by the same bits": (
        "src/lmscale/training/step/adamw.py",
        "round_to_bf16(second, bits >> HALF_BITS)",
        "round_to_bf16(second, bits)",
        "tests/training/test_half_moments.py::test_the_two_moments_are_rounded_independently",
    ),
    "bias's gradient from the gradient in float8": (
        "src/lmscale/parallel/fast_linear.py",
        "d_bias = sum_rows(grad_output)\n        return wait_for_d_x()",
        "d_bias = (grad.data.float() * grad.factor).sum(0).to(rows.dtype)\n        return wait_for_d_x()",
        "tests/parallel/test_float8.py::test_the_three_products_equal_those_of_the_rounded_matrices",
    ),
    "order loss in the half type": (
        "src/lmscale/models/bert/loss.py",
        "wide = order_logits.to(masked.dtype)",
        "wide = order_logits",
        "tests/models/test_alone.py::test_the_order_loss_of_a_half_type_is_computed_in_fp32",
    ),
}


def run_test(source: Path, test: str) -> int:
    """Exit code of pytest for one test of the package in a folder `source`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", test]
    variables = environment(PYTHONPATH=str(source))
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, timeout=500).returncode


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_mistake_that_once_passed_all_tests_is_detected(tmp_path, name: str) -> None:
    file, old, new, test = CHANGES[name]
    shutil.copytree(ROOT / "src", tmp_path / "src")
    assert run_test(tmp_path / "src", test) == 0
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    assert run_test(tmp_path / "src", test) == 1
