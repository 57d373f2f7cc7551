"""The code that torch.compile generates for a layer and for the loss on a GPU, checked without a GPU.

Not covered: NCCL, streams, CUDA graphs, the allocator, and which attention kernel a GPU chooses (flash is assumed).
"""

import pytest
from compiled_cases import LAYERS_IN_CI, LOSSES, MATRIX, compile_layers, compile_losses, name_of, problems_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
LAYERS = {name_of(choice): choice for choice in LAYERS_IN_CI + MATRIX}
FLASH = "torch.ops.aten._scaled_dot_product_flash_attention.default"


@pytest.fixture(scope="module")
def layers(guard) -> dict[str, dict]:
    return compile_layers(guard, list(LAYERS.values()))


@pytest.fixture(scope="module")
def losses(guard) -> dict[str, dict]:
    return compile_losses(guard)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_compiles_to_the_expected_number_of_kernels(layers, name) -> None:
    assert problems_of(name, layers[name]) == []
    assert all(size > 0 for sizes in layers[name]["cubins"].values() for size in sizes)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_compiles_to_the_expected_number_of_kernels(losses, name) -> None:
    assert problems_of(name, losses[name]) == []


@pytest.mark.parametrize("choice", [LAYERS_IN_CI[0], LAYERS_IN_CI[2]], ids=name_of)
def test_attention_dropout_reads_the_generator_at_every_step(layers, choice: dict) -> None:
    # A generator cloned by AOTAutograd is seeded once, when the graph is made. Our seeding per step would not reach it,
    # and a resumed run would draw different masks than the uninterrupted one.
    found = layers[name_of(choice)]
    assert found["cloned_generators"] == []
    assert [call for calls in found["calls"] for call in calls].count(FLASH) == 1
