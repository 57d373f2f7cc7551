"""Mistakes planted in the source: those that once passed every test are detected, and the driver finds its places."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from analysis.correctness import mutants
from analysis.correctness.mutation_sites import mutants_of

SEEDS, COUNTING = "tests/training/test_attention_seeds.py", "tests/training/test_counters.py"
UNIQUE = f"{SEEDS}::test_unique_seeds_give_every_rank_step_and_micro_step_its_own_mask"
MODULE, COUNTERS = "src/lmscale/training/step/module.py", "src/lmscale/training/step/counters.py"
SEED_CALL = "seed_rank_generator(self.seed, step, index, self.dropout_rank, {})"
LOSS = "src/lmscale/parallel/chunked_cross_entropy.py"
SUMS = "tests/parallel/test_cross_entropy.py::test_gradients_of_half_weights_and_biases_are_summed_over_chunks_in_fp32"
# Name -> file, correct text, text with the mistake, the test that detects it. The first is a bug this project had.
CHANGES = {
    "tensor rank left out of the seed": (
        MODULE,
        SEED_CALL.format("self.parallel.tp_rank"),
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
        SEED_CALL.format("self.parallel.tp_rank"),
        SEED_CALL.format("self.parallel.tp_rank").replace("index", "0"),
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


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """All changes, tried in a process that has not imported the package."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(mutants.try_by_hand, CHANGES).result()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_mistake_that_once_passed_all_tests_is_detected(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "failed"


def test_every_kind_of_place_is_found_once_and_messages_types_and_docstrings_are_left_alone() -> None:
    source = (
        'def f(x: int | None = 3) -> "int":\n'
        '    """1 < 2"""\n'
        "    if x < 0 and g(x):\n"
        '        raise ValueError(f"{x} + 1")\n'
        "    self.x = min(a[2:], b).float()\n"
        "    y = all_reduce(x, group, dim=a - b)\n"
        '    return f"{x}/{y}" if y else zip(x, y, strict=True)\n'
    )
    found = mutants_of("f.py", source)
    assert {(m.line, m.old, m.new) for m in found} == {
        (1, "3", "4"),
        (1, "3", "2"),
        (3, "x < 0 and g(x)", "x < 0 or g(x)"),
        (3, "x < 0", "x <= 0"),
        (3, "0", "1"),
        (4, "raise ValueError(f'{x} + 1')", "pass"),
        (5, "self.x = min(a[2:], b).float()", "pass"),
        (5, "min(a[2:], b).float()", "min(a[2:], b)"),
        (5, "min(a[2:], b)", "max(a[2:], b)"),
        (5, "a[2:]", "a[2 + 1:]"),
        (5, "2", "3"),
        (5, "2", "1"),
        (6, "all_reduce(x, group, dim=a - b)", "all_reduce(x, group)"),
        (6, "all_reduce(x, group, dim=a - b)", "all_reduce(group, x, dim=a - b)"),
        (6, "all_reduce(x, group, dim=a - b)", "x"),
        (6, "a - b", "a + b"),
        (7, "y", "not y"),
        (7, "f'{x}/{y}'", "f'/{y}'"),
        (7, "f'{x}/{y}'", "f'{x}/'"),
        (7, "zip(x, y, strict=True)", "zip(y, x, strict=True)"),
    }
    assert len({m.key for m in found}) == len(found)
    change = next(m for m in found if m.new == "a + b")
    assert change.plant(source.encode()) == source.replace("a - b", "(a + b)").encode()


def test_a_mutant_keeps_its_key_when_the_rest_of_the_file_changes() -> None:
    (before,), (*_, after) = (
        mutants_of("f.py", text) for text in ("a = b + c\n", "é = g(1, 2)\n\nd = -1; a = b + c\n")
    )
    assert (after.key, after.line, before.line) == (before.key, 3, 1)


def test_the_plan_names_existing_tests_and_at_least_400_mutants() -> None:
    plan = mutants.planned()
    assert len(plan) >= 400
    assert all((mutants.ROOT / test.split("::")[0]).is_file() for _, tests in plan.values() for test in tests)


def test_the_summary_counts_and_gives_wilsons_interval() -> None:
    (mutant, *_), rows = mutants_of("f.py", "a = b + c\n" * 4), {}
    plan = {f"f.py {n}": (mutant, []) for n in range(5)}
    for n, outcome in enumerate(("killed", "timed out", "survived", "survived")):
        rows[f"f.py {n}"] = {"line": n, "outcome": outcome}
    found = mutants.summarize(rows, plan, {"f.py 3": "the same"})
    assert (found["planned"], found["total"], found["partial"], found["killed"]) == (5, 4, True, 2)
    assert (found["survived"], found["equivalent"]) == ({"f.py 2": 2}, {"f.py 3": "the same"})
    assert found["kill_rate"] == round(2 / 3, 4)
    assert found["interval_95"] == [round(bound, 4) for bound in mutants.wilson(2, 3)]
    for bound in mutants.wilson(2, 3):  # the shares from which the observed one is 1.96 standard errors away
        assert (bound - 2 / 3) ** 2 == pytest.approx(1.96**2 * bound * (1 - bound) / 3)


def test_the_committed_summary_agrees_with_its_rows() -> None:
    rows, summary = mutants.read_rows(), json.loads(mutants.SUMMARY.read_text(encoding="utf-8"))
    survived = {key for key, row in rows.items() if row["outcome"] == "survived"}
    assert survived == summary["survived"].keys() | summary["equivalent"].keys()
    assert (summary["total"], summary["killed"]) == (len(rows), len(rows) - len(survived))
