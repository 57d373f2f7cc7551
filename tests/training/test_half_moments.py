"""bf16 moments: unbiased rounding, training close to fp32, bitwise resume, half the bytes."""

import pytest
import torch
from runs import read_rows, tiny_run, train_here
from sharding import compiler, small_config

from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, ShardSpec
from lmscale.parallel.rng import counter_bits
from lmscale.training.step import adamw as adamw_module
from lmscale.training.step.adamw import adamw, adamw_in_blocks, adamw_of_groups, place_of, round_to_bf16
from lmscale.training.step.optimizer import MixedPrecisionAdamW


def test_rounding_gives_an_adjacent_value_and_keeps_the_mean() -> None:
    values = torch.tensor([1.0, 1.001, -1.003, 3e-12, -7.7e20, 0.0, 1.0039]).expand(4000, -1).contiguous()
    bits = counter_bits(torch.tensor([1]), torch.arange(4000), torch.arange(7).int())[0].int()
    draws, values = round_to_bf16(values, bits).double(), values[0].clone()
    below = values.view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32).double()
    above = (below.float().view(torch.int32) + (1 << 16)).view(torch.float32).double()
    for column in range(len(values)):
        assert set(draws[:, column].tolist()) <= {below[column].item(), above[column].item()}
    steps = (above - below).abs()
    assert ((draws.mean(dim=0) - values.double()).abs() / steps).max() < 4 * 0.5 / 4000**0.5
    assert torch.equal(draws[:, 0], torch.ones(4000, dtype=torch.float64))  # exact in bf16: unchanged


RATES = (0.1, 1e-3, 0.01, 1e-4, 1e-8)


def step_number(number: int) -> torch.Tensor:
    """The numbers of update `number` without clipping; see `DeviceCounters.advance`."""
    return torch.tensor([1, 1, 1 - 0.9**number, 1 - 0.999**number, number])


def parameter(*shape: int, shard_dim: int | None = None) -> torch.Tensor:
    param = torch.zeros(shape)
    param.shard = ShardSpec(shape, shard_dim, "zeros")
    return param


def test_stochastic_rounding_tracks_a_second_moment_where_nearest_rounding_stalls() -> None:
    param = parameter(8, 512)
    first, second = (torch.zeros_like(param, dtype=torch.bfloat16) for _ in range(2))
    place = place_of("w", param, 0, param.shape[-1])
    for number in range(1, 1501):
        adamw(None, param, torch.ones_like(param), first, second, step_number(number), RATES, place)
    assert second.double().mean().item() == pytest.approx(1 - 0.999**1500, rel=0.01)


def test_the_two_moments_are_rounded_independently() -> None:
    param = parameter(64, 64)
    moments = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    rates = (0.1, 0.1, *RATES[2:])  # both moments of gradients of 1 are 0.1, which bf16 does not have
    adamw(
        None, param, torch.ones_like(param), *moments, step_number(1), rates, place_of("w", param, 0, param.shape[-1])
    )
    is_up = moments.float() > 0.1
    shares = is_up.double().mean(dim=(1, 2))
    assert (is_up[0] & is_up[1]).double().mean().item() == pytest.approx(
        (shares[0] * shares[1]).item(), abs=4 * 0.5 / 64
    )


@pytest.mark.parametrize(("shape", "dim"), [((6, 20), 0), ((6, 20), 1), ((20,), 0)])
def test_a_shard_rounds_as_its_part_of_the_whole_tensor(shape, dim) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient, whole = torch.randn(shape, generator=generator), parameter(*shape)

    def moments_after_two_updates(
        param: torch.Tensor, gradient: torch.Tensor, tp_rank: int, width: int = 5
    ) -> torch.Tensor:
        moments, place = torch.zeros(2, *param.shape, dtype=torch.bfloat16), place_of("w", param, tp_rank, width)
        tensors = [each.view(-1, width) for each in (param, gradient, *moments)]
        for number in (1, 2):
            adamw(None, *tensors, step_number(number), RATES, place)
        return moments

    expected = moments_after_two_updates(whole, gradient, 0, width=20).chunk(2, dim=1 + dim)
    assert not torch.equal(expected[0][0].float(), (gradient * 0.19).chunk(2, dim)[0].bfloat16().float())
    for rank, (part, slope) in enumerate(zip(torch.zeros(shape).chunk(2, dim), gradient.chunk(2, dim), strict=True)):
        part = part.clone()
        part.shard = ShardSpec(shape, dim, "zeros")
        assert torch.equal(moments_after_two_updates(part, slope.contiguous(), rank), expected[rank])


@pytest.mark.parametrize("rows", [1, 3, 7, 300])  # of a piece: several make a block, one does, several blocks
def test_blocks_of_rows_are_updated_as_the_whole_matrix(monkeypatch, rows) -> None:
    monkeypatch.setattr(adamw_module, "BLOCK_ELEMENTS", 7 * 40)
    generator = torch.Generator().manual_seed(0)
    updates, groups = [], torch.arange(3 * rows, dtype=torch.int32).view(3, rows) % 2
    rates = torch.tensor([RATES, RATES[::-1]])
    for update in (adamw_of_groups, adamw_in_blocks):
        generator.manual_seed(rows)
        param = parameter(3 * rows, 40)
        place = place_of("w", param, 3, 40).view(2, 3, rows)
        param = param.view(3, rows, 40)
        state = [torch.zeros_like(param, dtype=torch.bfloat16) for _ in range(3)]
        for number in (1, 2):
            gradient = torch.randn(3, rows, 40, generator=generator)
            table = {"rates": rates, "groups": groups, "place": place}
            update(state[0], param, gradient, *state[1:], step=step_number(number), **table)
        updates.append([param, *state])
    assert all(torch.equal(whole, blocks) for whole, blocks in zip(*updates, strict=True))
    assert all(tensor.any() for tensor in updates[0])


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_one_call_for_all_parameters_gives_the_bits_of_one_call_each(family) -> None:
    torch.compiler.reset()
    found = []
    for compiles in (False, True):
        model = build_model(small_config(family), ParallelContext(), seed=1, dtype=torch.bfloat16)
        config = OptimizerConfig(lr=0.01, moments="bf16", max_grad_norm=0.5)
        precision = PrecisionConfig("bf16")
        optimizer = MixedPrecisionAdamW(model.named_parameters(), config, precision, ParallelContext(), compiles)
        parameters = list(model.parameters())
        with compiler("aot_eager"):
            for number in (1, 2, 3):
                generator = torch.Generator().manual_seed(number)
                gradients = [torch.randn(p.shape, generator=generator).bfloat16() for p in parameters]
                optimizer.zero_grad()
                torch.autograd.backward([p * 1 for p in parameters], gradients)
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 * number
                optimizer.step()
        found.append({**optimizer.tensors(), **dict(model.named_parameters())})
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_run_stays_close_to_fp32(tmp_path) -> None:
    settings = {"trainer__max_steps": 8, "precision__dtype": "bf16"}
    for moments in ("fp32", "bf16"):
        run = tiny_run("gpt", tmp_path / moments, optimizer__moments=moments, **settings)
        assert train_here(run) == 0
    plain, half = ([row["train/loss"] for row in read_rows(tmp_path / name)] for name in ("fp32", "bf16"))
    assert half == pytest.approx(plain, rel=2e-3)
    assert half[-1] != plain[-1]
