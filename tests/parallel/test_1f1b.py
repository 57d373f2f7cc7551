"""The order 1F1B, and the division of layers into stages."""

import itertools
import queue
import threading

import pytest
import torch

from lmscale.parallel import ParallelContext, pipeline
from lmscale.partition import stage_layers

TIMEOUT_S = 20.0


class Rendezvous:
    """Stands for `exchange` between threads: a send ends when the other stage receives, as without any buffer."""

    def __init__(self, num_stages: int) -> None:
        pairs = list(itertools.permutations(range(num_stages), 2))
        self.sent, self.taken = {p: queue.Queue() for p in pairs}, {p: queue.Queue() for p in pairs}
        self.messages: list[tuple[int, int]] = []

    def __call__(self, stage: int, sent, received, context: ParallelContext) -> None:
        there, back = (context.pp_rank, stage), (stage, context.pp_rank)
        if sent is not None:
            self.messages.append(there)
            self.sent[there].put(sent.clone())
        if received is not None:
            received.copy_(self.sent[back].get(timeout=TIMEOUT_S))
            self.taken[back].put(None)
        if sent is not None:
            self.taken[there].get(timeout=TIMEOUT_S)


def run_stages(num_stages: int, num: int, monkeypatch) -> tuple[list[list[tuple[str, int]]], Rendezvous, torch.Tensor]:
    """Each stage doubles its input; returns the passes of each in their order, the messages, and d(sum of losses)/d(x)
    of each micro-batch's input x."""
    rendezvous, passes = Rendezvous(num_stages), [[] for _ in range(num_stages)]
    monkeypatch.setattr(pipeline, "exchange", rendezvous)
    inputs = torch.arange(1.0, num + 1).requires_grad_()

    def run(stage: int) -> None:
        def forward(index, micro_batch, received):
            assert (received is None) == (stage == 0)
            passes[stage].append(("F", index))
            return 2 * (inputs[index] if received is None else received)

        def backward(index, output, gradient):
            assert (gradient is None) == (stage == num_stages - 1)
            assert output.item() == 2 ** (stage + 1) * (index + 1)
            passes[stage].append(("B", index))
            output.backward(gradient)

        def start_grad_sync():
            passes[stage].append(("sync", None))

        context = ParallelContext(pp_rank=stage, pp_size=num_stages)
        pipeline.run_pipeline(
            range(num), forward, backward, start_grad_sync, lambda _: torch.empty(()), lambda _: None, context
        )

    threads = [threading.Thread(target=run, args=(stage,), daemon=True) for stage in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return passes, rendezvous, inputs.grad


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 11])
def test_every_stage_runs_1f1b(num_stages, num, monkeypatch) -> None:
    passes, rendezvous, gradients = run_stages(num_stages, num, monkeypatch)
    for stage, done in enumerate(passes):
        warmup = min(num_stages - 1 - stage, num)
        expected = [("F", i) for i in range(warmup)]
        for i in range(num - warmup):
            expected += [("F", warmup + i), ("B", i)]
        expected += [("B", i) for i in range(num - warmup, num)]
        expected.insert(expected.index(("B", num - 1)), ("sync", None))
        assert done == expected, stage
    assert gradients.tolist() == [2.0**num_stages] * num
    for first, second in itertools.pairwise(range(num_stages)):
        assert rendezvous.messages.count((first, second)) == rendezvous.messages.count((second, first)) == num
    assert len(rendezvous.messages) == 2 * num * (num_stages - 1)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head_layers", "sizes"),
    [
        (4, 1, 0.0, [4]),
        (4, 2, 0.0, [2, 2]),
        (5, 3, 0.0, [1, 2, 2]),
        (24, 4, 4.0, [7, 7, 7, 3]),
        (78, 4, 0.9, [19, 20, 20, 19]),
        (3, 3, 9.0, [1, 1, 1]),
        (24, 2, 0.3, [12, 12]),
    ],
)
def test_layers_are_divided_so_that_no_stage_is_slow(num_layers, num_stages, head_layers, sizes) -> None:
    stages = stage_layers(num_layers, num_stages, head_layers)
    assert [len(layers) for layers in stages] == sizes
    assert list(itertools.chain(*stages)) == list(range(num_layers))


def test_no_division_is_faster() -> None:
    for num_layers, num_stages, head in itertools.product(range(2, 9), (2, 3), (0.0, 0.4, 1.5, 3.0)):
        if num_stages > num_layers:
            continue
        own = [len(layers) for layers in stage_layers(num_layers, num_stages, head)]
        slowest = max([*own[:-1], own[-1] + head])
        cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
        others = [[b - a for a, b in itertools.pairwise((0, *cut, num_layers))] for cut in cuts]
        assert slowest == min(max([*other[:-1], other[-1] + head]) for other in others), (num_layers, num_stages, head)
