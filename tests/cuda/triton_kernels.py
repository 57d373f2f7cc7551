"""What the modules that Inductor generates contain: launches, Triton kernels, and their cubins without a device."""

import importlib.util
import re
import tempfile
from functools import cache
from typing import Any, NamedTuple


def capabilities_for(kernel: str) -> tuple[int, ...]:
    """The GPUs that a kernel must compile for: sm_80 (A100), which has no float8, and sm_90 (H100, H200)."""
    return (90,) if "fp8" in kernel else (80, 90)


def start_over(sources: list[str]) -> None:
    """Forget everything that was compiled."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    sources.clear()


def describe(sources: list[str], compiles_kernels: bool = True) -> dict[str, Any]:
    """Counts of graphs and graph breaks, launches and collectives per graph, cubin sizes and errors by kernel."""
    from torch._dynamo.utils import counters

    cubins, refused = {}, {}
    for source in sources if compiles_kernels else []:
        for name, kernel in kernels_in(source).items():
            try:
                cubins[name] = [compile_to_cubin(kernel, capability) for capability in capabilities_for(kernel)]
            except Exception as error:  # any error of Triton
                refused[name] = str(error.__cause__ or error).splitlines()[-1]
    return {
        "graphs": len(sources),
        "breaks": sum(counters["graph_break"].values()),
        "calls": [calls_in(source) for source in sources],
        "collectives": [products_behind_collectives(source) for source in sources],
        "cubins": cubins,
        "refused": refused,
    }


def kernels_in(source: str) -> dict[str, str]:
    """Sources of the Triton kernels of a generated module, by name."""
    return dict(re.findall(r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", source, re.M | re.S))


def calls_in(source: str) -> list[str]:
    """The launches of a generated module in order: `triton_...`, `extern_kernels....`, `torch.ops....`."""
    body = re.sub("'''.*?'''", "", source, flags=re.S)
    lines = [line for line in body.splitlines() if not line.lstrip().startswith("#")]
    pattern = re.compile(r"^\s.*?\b(triton_\w+)\.run\(|\b(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(")
    return [match[1] or match[2] for line in lines if (match := pattern.search(line))]


def products_behind_collectives(source: str) -> list[tuple[str, int]]:
    """Each collective of a generated module in order, and how many matrix products start before the wait for it."""
    body = re.sub("'''.*?'''", "", source, flags=re.S)
    begun: dict[str, tuple[int, int]] = {}  # place in `found` and number of products so far, by the result's name
    num_products, found = 0, []
    for line in body.splitlines():
        if match := re.search(
            r"(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+)\.default\((?:reinterpret_tensor\()?(\w+)", line
        ):
            result, kind, argument = match.groups()
            if kind == "wait_tensor":
                place, before = begun.pop(argument)
                found[place] = (found[place][0], num_products - before)
            elif "assert_" not in line:
                begun[argument if kind.endswith("_") else result] = (len(found), num_products)
                found.append((kind.removesuffix("_"), 0))
        elif re.search(r"^\s.*(extern_kernels|torch\.ops\.aten)\.(mm|addmm|_scaled_mm)\b", line):
            num_products += 1
    assert not begun, f"nothing waits for {sorted(begun)}"
    return found


@cache
def compile_to_cubin(source: str, capability: int) -> int:
    """Compile one kernel for a GPU of this capability (90: sm_90) and return the cubin's size in bytes.

    Raises:
        triton.CompilationError: Triton rejects the kernel, for instance a constant that its type cannot hold.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load_kernel(source)
    config, meta, names = kernel.config, kernel.triton_meta, kernel.function.arg_names
    constants = {name: value for name, value in (meta["constants"] | config.kwargs).items() if name in names}
    signature = {name: "constexpr" if name in constants else meta["signature"].get(name, "constexpr") for name in names}
    compiled = triton.compile(
        ASTSource(
            fn=kernel.function,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs=meta["configs"][0],
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    return len(compiled.asm["cubin"])


class Kernel(NamedTuple):
    """A Triton function and what Inductor says about its launches."""

    function: Any
    config: Any  # the first that Inductor would try
    triton_meta: dict[str, Any]
    inductor_meta: dict[str, Any]


def load_kernel(source: str) -> Kernel:
    """Execute the source of a kernel."""
    from torch._inductor.runtime import triton_heuristics

    loaded: list[Kernel] = []

    def take(size_hints: Any, configs: list, triton_meta: dict, *_: Any, inductor_meta: dict, **__: Any) -> Any:
        return lambda function: loaded.append(Kernel(function, configs[0], triton_meta, inductor_meta))

    tuned, triton_heuristics.cached_autotune = triton_heuristics.cached_autotune, take
    try:
        # Triton reads a function's source from its file while the module is imported.
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(source)
            file.flush()
            spec = importlib.util.spec_from_file_location("generated_kernel", file.name)
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    finally:
        triton_heuristics.cached_autotune = tuned
    return loaded[0]
