"""The code that torch.compile generates for a layer and for the loss on a GPU, checked without a GPU.

Not covered: NCCL, streams, CUDA graphs, the allocator, and which attention kernel a GPU chooses (flash is assumed).
"""

import pytest
from compiled_cases import LAYERS_IN_CI, LOSSES, MATRIX, compile_layers, compile_losses, name_of, problems_of

QUICK = LAYERS_IN_CI[2:3]  # a GPT in bf16 with sequence parallelism
OTHERS = {name_of(choice): choice for choice in LAYERS_IN_CI + MATRIX if choice not in QUICK}
FLASH = "torch.ops.aten._scaled_dot_product_flash_attention.default"


@pytest.fixture(scope="module")
def layers(guard) -> dict[str, dict]:
    return compile_layers(guard, QUICK)


@pytest.fixture(scope="module")
def losses(guard) -> dict[str, dict]:
    return compile_losses(guard)


@pytest.fixture(scope="module")
def others(guard) -> dict[str, dict]:
    return compile_layers(guard, list(OTHERS.values()))


@pytest.mark.parametrize("name", [name_of(choice) for choice in QUICK])
def test_a_layer_compiles_to_the_expected_number_of_kernels(layers, name) -> None:
    assert problems_of(name, layers[name]) == []
    assert all(size > 0 for sizes in layers[name]["cubins"].values() for size in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_compiles_to_the_expected_number_of_kernels(losses, name) -> None:
    assert problems_of(name, losses[name]) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", OTHERS)
def test_every_two_settings_of_a_layer_compile_together(others, name) -> None:
    assert problems_of(name, others[name]) == []
    assert all(size > 0 for sizes in others[name]["cubins"].values() for size in sizes)


@pytest.mark.parametrize(
    ("compiled", "choice"), [("layers", QUICK[0]), pytest.param("others", LAYERS_IN_CI[0], marks=pytest.mark.slow)]
)
def test_attention_dropout_reads_the_generator_at_every_step(request, compiled: str, choice: dict) -> None:
    # A generator cloned by AOTAutograd is seeded once, when the graph is made. Our seeding per step would not reach it,
    # and a resumed run would draw different masks than the uninterrupted one.
    found = request.getfixturevalue(compiled)[name_of(choice)]
    assert found["cloned_generators"] == []
    assert [call for calls in found["calls"] for call in calls].count(FLASH) == 1
