"""A simulated H200 on a CPU build of torch, sufficient for torch.compile to generate its kernels.

`install()` changes torch, Inductor and Triton for the whole process, so it needs its own process.
It uses private parts of torch; `problem()` reports versions that it was not written for.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TORCH, TRITON = "2.13.", "3.7."  # the versions whose private parts this uses
CAPABILITY = 90
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    total_memory=int(139.8 * 2**30),
    L2_cache_size=60 * 2**20,
    gcnArchName="",
    clock_rate=1_980_000,
    memory_clock_rate=3_201_000,
    memory_bus_width=6144,
    is_integrated=False,
    is_multi_gpu_board=False,
)
_GUARD = Path(__file__).with_name("guard.cpp")


def problem() -> str | None:
    """Why no GPU can be simulated here, or None; imports no torch."""
    version = importlib.metadata.version("torch")
    if not version.endswith("+cpu"):
        return f"needs a CPU build of torch, and {version} is none"
    if not version.startswith(TORCH):
        return f"uses private parts of torch {TORCH}*, and this is {version}"
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which a CPU build of torch does not bring"
    if not importlib.metadata.version("triton").startswith(TRITON):
        return f"uses private parts of triton {TRITON}*, and this is {importlib.metadata.version('triton')}"
    if shutil.which("g++") is None:
        return "needs g++ to build the device guard"
    return None


def build_guard(folder: Path) -> Path:
    """Compile `guard.cpp` against the installed torch; returns the library.

    Raises:
        subprocess.CalledProcessError: compilation failed.
    """
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    library = folder / "guard.so"
    headers, libraries = [f"-I{torch / 'include'}"], [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", *headers, str(_GUARD), *libraries, "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def install(guard: Path) -> None:
    """Load the guard and simulate an H200 for torch, Inductor and Triton. Call before torch is imported."""
    folder = importlib.util.find_spec("torch").submodule_search_locations[0]
    for library in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(os.path.join(folder, "lib", library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(guard), mode=ctypes.RTLD_GLOBAL)
    import torch

    torch._C._ensureCUDADeviceGuardSet = lambda: None
    _install_in_torch(torch)
    _install_in_triton()
    _install_in_inductor(torch)


def run(script: str, guard: Path, argument: Any, **environment: str) -> Any:
    """Run a script of this folder with the guard and a JSON argument; returns the JSON it prints on its last line.

    Raises:
        RuntimeError: the script failed, with the end of what it wrote.
    """
    command = [sys.executable, str(_GUARD.with_name(script)), str(guard), json.dumps(argument)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{script} failed: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class _NoDevice:
    """`torch.cuda.device` without effect."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> "_NoDevice":
        return self

    def __exit__(self, *_: Any) -> bool:
        return False


def _install_in_torch(torch: Any) -> None:
    import torch._subclasses.fake_tensor as fake_tensor

    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": True,
        "_lazy_init": None,
        "init": None,
        "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0),
        "get_device_name": PROPERTIES.name,
        "synchronize": None,
        "is_bf16_supported": True,
        "set_device": None,
        "_maybe_exchange_device": 0,
        "_exchange_device": 0,
        "set_rng_state": None,
        "current_stream": SimpleNamespace(cuda_stream=0, stream_id=0, device=torch.device("cuda", 0)),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.device = torch.cuda._DeviceGuard = _NoDevice
    torch.cuda.default_generators = (torch.default_generator,)
    torch.Generator = _cpu_generator(torch.Generator)
    torch.nn.functional.scaled_dot_product_attention = _attention
    torch.version.cuda = torch.version.cuda or "13.0"
    torch._C._cuda_getCurrentRawStream = torch._C._cuda_getDevice = lambda *_: 0
    torch.accelerator.is_available = lambda: False
    for name in ("init_gpu_context", "init_cuda_context"):
        if hasattr(fake_tensor, name):
            setattr(fake_tensor, name, lambda *_: None)


def _cpu_generator(base: type) -> type:
    class Generator(base):
        """A generator on the CPU, also for a GPU, for which a CPU build of torch has none."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, "cpu")

    return Generator


def _attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """torch's choice on a GPU without cuDNN's kernel: flash for half types without a mask, else memory-efficient."""
    import torch

    if attn_mask is None and q.dtype.itemsize == 2:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    bias = attn_mask
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
        bias = bias.expand(*q.shape[:-1], k.shape[-2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]


def _install_in_triton() -> None:
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    limits = {
        "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
        "multiprocessor_count": PROPERTIES.multi_processor_count,
        "warpSize": 32,
        "max_num_regs": PROPERTIES.regs_per_multiprocessor,
        "sm_clock_rate": PROPERTIES.clock_rate,
        "mem_clock_rate": PROPERTIES.memory_clock_rate,
        "mem_bus_width": PROPERTIES.memory_bus_width,
    }
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda *_: 0,
            is_active=lambda: True,
            utils=SimpleNamespace(get_device_properties=lambda _: limits),
        )
    )
    triton_helpers.set_driver_to_gpu = triton_helpers.set_driver_to_cpu = lambda *_: None


def _install_in_inductor(torch: Any) -> None:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph, post_grad

    for patterns in (joint_graph, post_grad):  # their patterns are traced without the simulated device
        patterns.lazy_init(torch.device("cpu"))
        patterns.lazy_init = lambda *_, **__: None
    answers = {
        "get_device_properties": PROPERTIES,
        "is_available": True,
        "get_compute_capability": CAPABILITY,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "current_device": 0,
        "device_count": 1,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "get_raw_stream": 0,
    }
    cuda = device_interface.CudaInterface
    for name, answer in answers.items():
        setattr(cuda, name, staticmethod(lambda *_, _answer=answer, **__: _answer))
    cuda.Worker.get_device_properties = staticmethod(lambda *_, **__: PROPERTIES)
    cuda.device = _NoDevice
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, cuda)
    inductor_config.compile_threads = 1
    inductor_config.fx_graph_cache = inductor_config.fx_graph_remote_cache = False
    inductor_config.joint_graph_constant_folding = False
    functorch_config.enable_autograd_cache = False


def capture_generated_code(runs: list | None = None) -> list[str]:
    """Make Inductor generate its modules without running them; returns the list that collects their sources.

    Compile and call only inside FakeTensorMode: outputs of graphs are empty tensors of the right shape.

    Args:
        runs: collects (source, arguments) of every call of a generated module.
    """
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []

    def compile_to_module(self: Any) -> SimpleNamespace:
        written = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        source = getattr(written[0], "value", written[0])
        sources.append(source)
        inputs, outputs = list(self.graph_inputs.values()), [_layout_of(output) for output in self.graph_outputs]

        def call(arguments: list) -> list:
            sizes = _sizes_by_symbol(inputs, arguments)
            if runs is not None:
                runs.append((source, list(arguments)))
            arguments.clear()
            return [layout and _empty(*layout, sizes) for layout in outputs]

        self.cache_key, self.cache_path, self.cache_linemap = "none", os.devnull, []  # Inductor opens this path
        return SimpleNamespace(__file__="none", __name__="none", key="none", cache_key="none", call=call, value=source)

    GraphLowering.compile_to_module = GraphLowering._compile_to_module = compile_to_module
    return sources


def _layout_of(output: Any) -> tuple | None:
    """Size, stride, type and device of a graph's output; None if it is not a tensor."""
    try:
        return output.get_size(), output.get_stride(), output.get_dtype(), output.get_device()
    except (AttributeError, NotImplementedError):
        return None


def _sizes_by_symbol(inputs: list, arguments: list) -> dict:
    """The values of the symbols in a graph with dynamic shapes; they are inputs, or sizes of inputs."""
    sizes = {}
    for described, value in zip(inputs, arguments, strict=True):
        is_tensor = hasattr(described, "get_size")
        sizes |= dict(zip(described.get_size(), value.shape, strict=True)) if is_tensor else {described: value}
    return sizes


def _empty(size: Any, stride: Any, dtype: Any, device: Any, sizes: dict) -> Any:
    import sympy
    import torch

    shape, strides = (tuple(int(sympy.sympify(n).subs(sizes)) for n in numbers) for numbers in (size, stride))
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
