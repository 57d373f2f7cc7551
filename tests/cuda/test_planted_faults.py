"""The tests of this folder report faults that only a GPU would show."""

import fake_gpu
import pytest
from compiled_cases import LAYERS_IN_CI, layer_case, name_of
from compiled_cases import problems_of as problems_of_code
from fake_step import FACTORS
from fake_step import problems_of as problems_of_step
from interpreted_kernels import TOLERANCES

pytestmark = pytest.mark.slow
STEP = {factor: values[-1] for factor, values in FACTORS.items()}
IN_STEPS = {
    "sites on the host": "add mixes devices in models/transformer.py:",
    "loss checked by the host": "the host waits for _local_scalar_dense in training/module.py:",
}
ON_THE_LAST_RANK = LAYERS_IN_CI[3]  # with exact attention, whose mask begins at the row of the rank's first head
IN_CODE = {
    "columns from four": "Triton refuses triton_",
    "graph break": " breaks, expected ",
}
ON_THE_WRONG_ROWS = "dropout/rows without their offset"


@pytest.fixture(scope="module")
def steps(guard) -> dict[str, list[str]]:
    found = fake_gpu.run("fake_step.py", guard, [STEP | {"fault": fault} for fault in IN_STEPS])
    return {fault: problems_of_step(one) for fault, one in zip(IN_STEPS, found, strict=True)}


@pytest.fixture(scope="module")
def code(guard) -> dict[str, list[str]]:
    name, case = name_of(ON_THE_LAST_RANK), layer_case(ON_THE_LAST_RANK)
    cases = [case | {"fault": fault, "cubins": fault != "graph break"} for fault in IN_CODE]
    found = fake_gpu.run("compiled_layer.py", guard, cases)
    return {fault: problems_of_code(name, one) for fault, one in zip(IN_CODE, found, strict=True)}


@pytest.mark.parametrize("fault", IN_STEPS)
def test_a_step_with_a_fault_is_reported(steps, fault) -> None:
    assert any(problem.startswith(IN_STEPS[fault]) for problem in steps[fault]), steps[fault]


@pytest.mark.parametrize("fault", IN_CODE)
def test_generated_code_with_a_fault_is_reported(code, fault) -> None:
    assert any(IN_CODE[fault] in problem for problem in code[fault]), code[fault]


def test_a_mask_of_the_wrong_rows_is_reported(guard) -> None:
    found = fake_gpu.run("interpreted_kernels.py", guard, [ON_THE_WRONG_ROWS], TRITON_INTERPRET="1")
    assert not found[ON_THE_WRONG_ROWS]["same_zeros"]
    assert found[ON_THE_WRONG_ROWS]["error"] > TOLERANCES["dropout"]
