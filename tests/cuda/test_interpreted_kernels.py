"""The kernels generated for a GPU compute on CPU tensors, in Triton's interpreter, what eager torch computes.

A whole layer too, forward and backward, on one rank.
"""

import fake_gpu
import pytest
from interpreted_kernels import TOLERANCES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compared(guard, request) -> dict[str, dict]:
    """The kernels of the selected tests."""
    chosen = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    names = [name for name in TOLERANCES if name in chosen]
    return fake_gpu.run("interpreted_kernels.py", guard, names, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", TOLERANCES)
def test_a_kernel_computes_what_eager_torch_computes(compared, name) -> None:
    assert compared[name]["error"] <= TOLERANCES[name]


@pytest.mark.parametrize("name", [name for name in TOLERANCES if name.startswith("dropout")])
def test_dropout_on_the_second_rank_drops_the_elements_that_one_rank_drops(compared, name) -> None:
    assert compared[name]["same_zeros"]
