"""The Triton kernels in a module that Inductor wrote: their sources, and their cubins without a device."""

import importlib.util
import re
import tempfile
from typing import Any


def kernels_in(source: str) -> dict[str, str]:
    """Sources of the Triton kernels of a generated module, by name."""
    return dict(re.findall(r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", source, re.M | re.S))


def calls_in(source: str) -> list[str]:
    """What a generated module launches, in order: `triton_...`, `extern_kernels....`, `torch.ops....`."""
    body = re.sub("'''.*?'''", "", source, flags=re.S)
    lines = [line for line in body.splitlines() if not line.lstrip().startswith("#")]
    pattern = re.compile(r"^\s.*?\b(triton_\w+)\.run\(|\b(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(")
    return [match[1] or match[2] for line in lines if (match := pattern.search(line))]


def compile_to_cubin(source: str, capability: int) -> int:
    """Compile one kernel for a GPU of this capability (90: sm_90) and return the cubin's size in bytes.

    Raises:
        triton.CompilationError: Triton refuses the kernel, for instance for a constant that its type cannot hold.
    """
    import triton
    from torch._inductor.runtime import triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel: dict[str, Any] = {}

    def take(size_hints: Any, configs: list, triton_meta: dict, *_: Any, **__: Any) -> Any:
        kernel.update(config=configs[0], meta=triton_meta)
        return lambda function: kernel.setdefault("function", function)

    tuned, triton_heuristics.cached_autotune = triton_heuristics.cached_autotune, take
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
            file.write(source)
        spec = importlib.util.spec_from_file_location("generated_kernel", file.name)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    finally:
        triton_heuristics.cached_autotune = tuned
    config, meta, names = kernel["config"], kernel["meta"], kernel["function"].arg_names
    constants = {name: value for name, value in (meta["constants"] | config.kwargs).items() if name in names}
    signature = {name: "constexpr" if name in constants else meta["signature"].get(name, "constexpr") for name in names}
    compiled = triton.compile(
        ASTSource(
            fn=kernel["function"],
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs=meta["configs"][0],
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    return len(compiled.asm["cubin"])
