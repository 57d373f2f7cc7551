"""Run the modules that Inductor generates for a GPU on CPU tensors, their kernels by Triton's interpreter.

TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.language import tensor
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle
from triton_kernels import load_kernel, start_over

FUNCTIONS = ("exp", "log", "sqrt", "rsqrt", "tanh", "erf")  # of NVIDIA's libdevice, in which Triton has no bodies


def compile_and_run(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], runs: list, sources: list[str], dynamic: bool = False
) -> tuple[Any, list[Tensor | None]]:
    """Compile a function for the simulated GPU and run its kernels on CPU tensors.

    Args:
        function: of tensors on one device; it returns one tensor if an input requires a gradient.
        inputs: CPU tensors, of which `function` uses every one.
        runs, sources: of `fake_gpu.capture_generated_code`.

    Returns:
        its result, and the gradients of the inputs for an output gradient of ones.
    """
    start_over(sources)
    runs.clear()
    with FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype, device="cuda", requires_grad=x.requires_grad) for x in inputs]
        result = torch.compile(function, dynamic=dynamic)(*fakes)
        trains = isinstance(result, Tensor) and result.requires_grad
        if trains:
            result.backward(torch.empty_like(result))
    values = {id(fake): x.detach() for fake, x in zip(fakes, inputs, strict=True)}
    forward, arguments = runs[0]
    results = run_module(forward, [values.get(id(a), a) for a in arguments])
    if not trains:
        return results, []
    backward, _ = runs[1]
    first, *saved = results
    found = run_module(backward, [*saved, torch.ones_like(first)])
    gradients = {id(a): gradient for a, gradient in zip(arguments, found, strict=True)}
    return first, [gradients[id(fake)] for fake in fakes]


def run_module(source: str, arguments: list) -> list[Tensor]:
    """Execute a generated module's graph on CPU tensors."""
    _fill_libdevice()
    AsyncCompile.triton = lambda self, name, kernel, **_: SimpleNamespace(run=_launcher(kernel))
    module = {"__name__": "generated_module"}
    exec(compile(source, "generated_module", "exec"), module)
    module["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    module["get_raw_stream"] = lambda _: 0
    module["copy_if_misaligned"] = lambda x: x
    return list(module["call"](list(arguments)))


def _launcher(source: str) -> Callable[..., None]:
    function, config, _, inductor_meta = load_kernel(source)

    def run(*arguments: Any, stream: int) -> None:
        names = [name for name in function.arg_names if name not in config.kwargs]
        named = dict(zip(names, arguments, strict=False)) | config.kwargs
        grid = GridExpr.from_meta(inductor_meta, config).eval_slow(named)
        function[grid](**named)

    return run


def _fill_libdevice() -> None:
    def body(name: str) -> Callable[[tensor], tensor]:
        def compute(x: tensor) -> tensor:
            result = getattr(torch, name)(torch.from_numpy(x.handle.data)).numpy()
            return tensor(TensorHandle(result, x.handle.dtype), x.type)

        return compute

    for name in FUNCTIONS:
        setattr(libdevice, name, body(name))
