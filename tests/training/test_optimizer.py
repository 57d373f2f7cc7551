"""The optimizer: parameter groups, masters, skipped steps and clipping."""

import dataclasses
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from ranks import make_context, run_ranks
from sharding import compiler, random_batch, small_config, total_loss

from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.training.step.adamw import update_by_torch
from lmscale.training.step.optimizer import MixedPrecisionAdamW


def make(dtype: str = "fp32", context: ParallelContext | None = None, compiles: bool = False, **changes):
    """A small model and its optimizer."""
    context = context or ParallelContext()
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    model = build_model(small_config("bert"), context, seed=3, dtype=types[dtype])
    precision = PrecisionConfig(dtype, initial_loss_scale=changes.pop("initial_loss_scale", 1024.0))
    config = OptimizerConfig(lr=0.01, **changes)
    return model, MixedPrecisionAdamW(model.named_parameters(), config, precision, context, compiles)


def set_gradients(model, optimizer, seed: int = 0, scale: float = 1.0) -> None:
    """Set random gradients of what is not frozen through a backward pass."""
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [(torch.randn(p.shape, generator=generator) * scale).to(p.dtype) for p in parameters]
    torch.autograd.backward([p * 1 for p in parameters], gradients)


def test_biases_and_layer_norms_are_not_decayed() -> None:
    model, optimizer = make()
    names = dict(zip(optimizer.masters, optimizer.names, strict=True))
    decayed = {names[p] for g in optimizer.param_groups if g["weight_decay"] == 0.01 for p in g["params"]}
    kept = {names[p] for g in optimizer.param_groups if g["weight_decay"] == 0.0 for p in g["params"]}
    assert decayed | kept == {name for name, _ in model.named_parameters()} and not decayed & kept
    assert all(name.endswith("bias") or "norm" in name for name in kept)
    assert not any(name.endswith("bias") or "norm" in name for name in decayed)
    assert "transformer.word_embedding.weight" in decayed


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_tensors_to_be_saved_are_no_copies_and_need_no_gradient(dtype: str) -> None:
    model, optimizer = make(dtype)
    weights = optimizer.tensors()
    for (name, param), master in zip(model.named_parameters(), optimizer.masters, strict=True):
        saved = weights[f"model/{name}"]
        assert saved.data_ptr() == master.data_ptr() and (dtype == "bf16" or saved.data_ptr() == param.data_ptr())
        assert not saved.requires_grad


EARLY, LATE = "transformer.layers.0.", "norm"  # prefix of what is frozen at once, part of what is after a step


def train_frozen(rank: int, zero1: bool, dtype: str, moments: str, compiles: bool, context=None) -> tuple[dict, dict]:
    """Weights after one and after three steps, of which part is frozen."""
    context = context or dataclasses.replace(make_context(1, 2), zero1=zero1)
    model, optimizer = make(dtype, context, compiles, moments=moments, weight_decay=0.3, max_grad_norm=0.5)
    first = None
    for step in range(3):
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(EARLY) and (step == 0 or LATE not in name))
        set_gradients(model, optimizer, step)
        optimizer.reduce_gradients()
        optimizer.step()
        first = first or {key: value.clone() for key, value in state_of(model, optimizer).items()}
    return first, state_of(model, optimizer) | {"norm": optimizer.counters.read().grad_norm}


def state_of(model, optimizer) -> dict[str, torch.Tensor]:
    """Weights, masters and moments."""
    whole = {f"{kind}/{name}" for kind in optimizer.kinds for name, _ in model.named_parameters()}
    return dict(model.named_parameters()) | optimizer.whole_tensors(whole)


@pytest.mark.parametrize(
    ("dtype", "moments", "compiles"),
    [("fp32", "fp32", False), ("bf16", "fp32", False), ("bf16", "bf16", False), ("bf16", "fp32", True)],
)
def test_frozen_weights_and_their_moments_stay_to_the_bit(dtype, moments, compiles) -> None:
    drawn = dict(make(dtype)[0].named_parameters())
    torch.compiler.reset()
    with compiler("aot_eager"):
        first, last = train_frozen(0, False, dtype, moments, compiles, ParallelContext())
    for key, before in first.items():
        name = key.partition("/")[2] or key
        assert torch.equal(last[key], before) == (name.startswith(EARLY) or LATE in name), key
        if key.startswith(EARLY):
            assert torch.equal(before, drawn[key]), key


@pytest.mark.parametrize("freezes", [False, True])
def test_fp32_is_torchs_adamw_and_frozen_weights_are_skipped_also_in_the_norm(freezes: bool) -> None:
    model, reference = (build_model(small_config("bert"), ParallelContext(), seed=3) for _ in range(2))
    for each in (model, reference):
        each.transformer.requires_grad_(not freezes)
    config = OptimizerConfig(lr=0.01, weight_decay=0.3, max_grad_norm=0.5)
    optimizer = MixedPrecisionAdamW(model.named_parameters(), config, PrecisionConfig("fp32"), ParallelContext())
    groups = [([p for p in reference.parameters() if (p.ndim > 1) == decays], 0.3 * decays) for decays in (True, False)]
    theirs = torch.optim.AdamW([{"params": params, "weight_decay": decay} for params, decay in groups], lr=0.01)
    for step in range(3):
        set_gradients(model, optimizer, step)
        set_gradients(reference, theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        theirs.step()
        assert optimizer.counters.read().grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("dtype", "moments"), [("fp32", "fp32"), ("bf16", "bf16")])
def test_frozen_weights_of_zero1_are_those_of_whole_replicas(dtype, moments) -> None:
    whole, parts = (run_ranks(train_frozen, 2, zero1, dtype, moments, False)[0] for zero1 in (False, True))
    assert parts[1].pop("norm") == pytest.approx(whole[1].pop("norm"), rel=1e-6)
    for one, two in zip(whole, parts, strict=True):
        for key, expected in one.items():
            torch.testing.assert_close(two[key], expected, rtol=1e-2 if moments == "bf16" else 1e-6, atol=1e-6, msg=key)
    for key, before in parts[0].items():
        if LATE in key or EARLY in key:
            assert torch.equal(parts[1][key], before), key


def test_a_frozen_weight_is_not_unfrozen_before_another_fit() -> None:
    model, optimizer = make()
    model.transformer.requires_grad_(False)
    set_gradients(model, optimizer)
    optimizer.step()
    model.transformer.requires_grad_(True)
    set_gradients(model, optimizer)
    message = "^`requires_grad` of transformer.* must stay False until another `fit`, because it was frozen"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    with pytest.raises(ValueError, match="^`add_param_group` must not be called: this optimizer has all parameters"):
        optimizer.add_param_group({"params": []})


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fp32_masters_of_half_weights_keep_small_updates(dtype) -> None:
    model, optimizer = make(dtype, max_grad_norm=None)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    before = [m.clone() for m in optimizer.masters]
    for _ in range(3):
        set_gradients(model, optimizer, scale=1024.0 if dtype == "fp16" else 1.0)
        optimizer.step()
    for param, master, start in zip(model.parameters(), optimizer.masters, before, strict=True):
        assert master.dtype == torch.float32 and param.dtype == half
        assert torch.equal(param, master.to(half))
        moved = (master - start).abs()
        assert moved.max() <= 3.1e-5 and moved.max() > 2e-5  # about lr per update, below bf16's resolution at 1


def test_masters_that_are_not_read_from_a_checkpoint_stay() -> None:
    """As those of a new head on a pretrained encoder."""
    _, optimizer = make("bf16")
    drawn = [master.clone() for master in optimizer.masters]
    optimizer.load_masters(lambda key, out: None)
    assert all(map(torch.equal, optimizer.masters, drawn))


@pytest.fixture
def compiles(request) -> Iterator[bool]:
    """Whether the step is compiled, with the backend of the parameter."""
    torch.compiler.reset()
    with compiler(request.param or "inductor"):
        yield request.param is not None


@pytest.mark.parametrize(
    ("dtype", "moments", "compiles"),
    [
        *((*types, None) for types in (("fp16", "fp32"), ("fp16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))),
        *(pytest.param("fp16", moments, "inductor", marks=pytest.mark.slow) for moments in ("fp32", "bf16")),
    ],
    indirect=["compiles"],
)
def test_a_step_with_a_non_finite_gradient_is_skipped_and_changes_nothing(dtype, moments, compiles) -> None:
    model, optimizer = make(dtype, compiles=compiles, moments=moments)
    before = [p.clone() for p in model.parameters()]
    for value in (float("inf"), float("nan")):
        set_gradients(model, optimizer)
        next(iter(optimizer.gradients().values())).view(-1)[5] = value
        optimizer.step()
        # The diagnosis reads which gradients are not finite; clipping must not spread the nan.
        assert [g.isfinite().all().item() for g in optimizer.gradients().values()].count(False) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(optimizer.state[m][kind].any() for m in optimizer.masters for kind in ("exp_avg", "exp_avg_sq"))
    counters = optimizer.counters.read()
    assert (counters.num_updates, counters.num_skipped) == (0, 2)
    assert counters.loss_scale == (512.0 if dtype == "fp16" else 1.0)
    assert not any(key.startswith("exp_avg") for key in optimizer.tensors())


def _inf_on_one_rank(rank: int, names: list[str]) -> list[dict]:
    context = make_context(tp_size=2)
    return [_skip_and_continue(rank, name, context) for name in names]


def _skip_and_continue(rank: int, name: str, context: ParallelContext) -> dict:
    model, optimizer = make("fp16", context)
    before = {n: p.clone() for n, p in model.named_parameters()}
    loss = total_loss(model, random_batch(model.config)) * optimizer.counters.loss_scale
    loss.backward()
    if rank == 1:
        optimizer.gradients()[name].view(-1)[0] = float("inf")
    optimizer.step()
    skipped = all(torch.equal(before[n], p) for n, p in model.named_parameters())
    counters = optimizer.counters.read()
    first = counters.num_skipped, counters.loss_scale_overflows_left, skipped
    optimizer.zero_grad()
    (total_loss(model, random_batch(model.config)) * optimizer.counters.loss_scale).backward()
    optimizer.step()
    counters = optimizer.counters.read()
    return {"first": first, "second": (counters.num_updates, counters.num_skipped), "norm": counters.grad_norm}


def test_an_inf_on_one_tensor_rank_makes_all_ranks_skip() -> None:
    """In a sharded and in a replicated parameter: all ranks agree and continue together."""
    names = ["transformer.layers.1.mlp.up.weight", "transformer.layers.0.mlp_norm.weight"]
    for results in zip(*run_ranks(_inf_on_one_rank, 2, names), strict=True):
        for result in results:
            assert result["first"] == (1, 1, True)
            assert result["second"] == (1, 1)
        assert results[0]["norm"] == results[1]["norm"]


def adamw_in_fp64(master, gradient, moments, number: int, beta1: float, lr: float, decay: float) -> tuple:
    """Algorithm 2 of Loshchilov and Hutter in fp64: the new master and both moments."""
    gradient, master = gradient.double(), master.double()
    first = beta1 * moments[0].double() + (1 - beta1) * gradient
    second = 0.999 * moments[1].double() + 0.001 * gradient.square()
    step = first / (1 - beta1**number) / ((second / (1 - 0.999**number)).sqrt() + 1e-8)
    return master - lr * decay * master - lr * step, first, second


@pytest.mark.parametrize(
    ("dtype", "moments", "compiles"),
    [
        *(pytest.param(*types, "inductor", marks=pytest.mark.slow) for types in (("bf16", "fp32"), ("bf16", "bf16"))),
        ("bf16", "fp32", "aot_eager"),
        ("bf16", "bf16", None),
    ],
    indirect=["compiles"],
)
def test_the_update_is_adamw_of_fp64_within_eight_roundings(dtype, moments, compiles) -> None:
    """Relative to the largest number of the tensor: in fp32 the master to 2.4e-7, the second moment, for which the
    factor, the clipped gradient and its square are rounded, to 4.8e-7; bf16 moments to one of their own steps."""
    model, optimizer = make(dtype, compiles=compiles, moments=moments, max_grad_norm=0.5)
    kinds, bound = ("exp_avg", "exp_avg_sq"), 1e-14 if dtype == "fp64" else 4 * 2**-24
    for number, beta1 in ((1, 0.9), (2, 0.9), (3, 0.8)):  # some schedules of torch change it
        for group in optimizer.param_groups:
            group["betas"] = beta1, 0.999
        before = [(m.clone(), *(optimizer.state[m][kind].clone() for kind in kinds)) for m in optimizer.masters]
        set_gradients(model, optimizer, number)
        gradients = [m.grad.clone() for m in optimizer.masters]
        factor = 0.5 / (torch.cat([g.double().flatten() for g in gradients]).norm() + 1e-6)
        optimizer.step()
        for master, gradient, (old, *old_moments) in zip(optimizer.masters, gradients, before, strict=True):
            decay = 0.01 if master.ndim > 1 else 0.0
            new, *new_moments = adamw_in_fp64(old, gradient.double() * factor, old_moments, number, beta1, 0.01, decay)
            assert (master.double() - new).abs().max() <= bound * new.abs().max()
            for kind, expected in zip(kinds, new_moments, strict=True):
                error = (optimizer.state[master][kind].double() - expected).abs()
                rounding = 2**-7 * expected.abs() if moments == "bf16" else 0.0
                assert (error <= rounding + 2 * bound * expected.abs().max()).all()
        for param, master in zip(model.parameters(), optimizer.masters, strict=True):
            assert torch.equal(param, master.to(param.dtype))
    assert optimizer.counters.read().num_updates == 3


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_the_host_needs_few_calls_and_little_time_per_parameter(moments) -> None:
    """One compiled call per parameter took 80 to 110 us of thread time for each; one call for all takes 5 to 7 us."""
    torch.compiler.reset()
    config = small_config("gpt", num_layers=20, hidden_size=16)
    model = build_model(config, ParallelContext(), seed=3, dtype=torch.bfloat16)
    settings = OptimizerConfig(lr=0.01, moments=moments), PrecisionConfig("bf16")
    optimizer = MixedPrecisionAdamW(model.named_parameters(), *settings, ParallelContext(), compiles=True)
    seconds = []
    with (
        compiler("aot_eager"),
        mock.patch.object(optimizer._one_pass, "adamw", wraps=optimizer._one_pass.adamw) as calls,
    ):
        for number in range(6):
            set_gradients(model, optimizer, number)
            start = time.thread_time()
            optimizer.reduce_gradients()
            optimizer.step()
            seconds.append(time.thread_time() - start)
    assert calls.call_count <= 4 * 6
    assert min(seconds) < 30e-6 * len(optimizer.masters)


def test_torchs_kernel_is_told_0_for_an_update_and_1_for_a_skipped_step(monkeypatch) -> None:
    told = []
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, found_inf, **kwargs: told.append(found_inf.item()))
    master = torch.nn.Parameter(torch.ones(3))
    master.grad = torch.ones(3)
    group = {"params": [master], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    state = {master: {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}}
    for finite in (1.0, 0.0):
        update_by_torch(group, state, {}, torch.tensor([1.0, finite, 0.1, 0.01, 1.0]), frozen=set())
    assert told == [0.0, 1.0]  # any number but 1 is an update for it, so results alone do not show this
