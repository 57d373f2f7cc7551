"""Which of a GPU's fused attention kernels is fastest on a run's shapes, and how torch is told to take it."""

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from ..config import TransformerConfig
from ..config.model import WITHOUT_DROPOUT

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ALL_BACKENDS = BACKENDS | {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash3": SDPBackend.FLASH_ATTENTION}
WARM_UP, CALLS = 3, 10
LEAST_GAIN = 0.03  # a backend replaces one that stands before it in `BACKENDS` only if it is faster by this share


@contextlib.contextmanager
def only_backend(attention: str) -> Iterator[None]:
    """Within it, torch takes this one of `ALL_BACKENDS`, and raises RuntimeError where it refuses an input."""
    if attention == "flash3":  # takes the place of torch's FlashAttention-2
        activate_flash_attention_impl("FA3")
    try:
        with sdpa_kernel(ALL_BACKENDS[attention]):
            yield
    finally:
        if attention == "flash3":
            restore_flash_attention_impl()


@contextlib.contextmanager
def preferred_backend(attention: str) -> Iterator[None]:
    """Within it, torch takes the backend of `model.attention`: of `BACKENDS` first, and the other where it refuses an
    input; of `WITHOUT_DROPOUT` alone.

    cuDNN's is not tried by itself. It rounds the probability of dropout to sixteenths on torch 2.11, and later versions
    refuse others (pytorch#174245). Its backward pass with a mask can give nan (pytorch#196678, torch 2.11 to 2.13).
    `leave_cudnn_out` also takes it out of torch's own choice, where it is first on new GPUs.

    Args:
        attention: a name in `ALL_BACKENDS`; any other leaves torch's own order.
    """
    if attention not in ALL_BACKENDS:
        yield
        return
    # At its first choice on Hopper torch 2.11 to 2.13 otherwise sets an order of its own, cuDNN's first, over this one.
    os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
    others = [backend for name, backend in BACKENDS.items() if name != attention]
    order = [ALL_BACKENDS[attention], *others, SDPBackend.MATH]
    chosen = only_backend(attention) if attention in WITHOUT_DROPOUT else sdpa_kernel(order, set_priority=True)
    # The compiler's cache on disk does not know the order: without the tag it would return another backend's layer.
    with chosen, torch.compiler.config.patch(cache_key_tag=attention):
        yield


def leave_cudnn_out() -> None:
    """Take cuDNN's attention out of torch's choice for this process, but not where `preferred_backend` chose it."""
    if torch.backends.cuda.flash_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)


def fastest_backend(
    config: TransformerConfig,
    tp_size: int,
    micro_batch_size: int,
    seq_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """The name in `BACKENDS` of the fastest forward and backward pass, or `sdpa` if every backend refuses the inputs.

    Shapes:
        Q, K and V are views of [b, s, n/p, 3, d], as `SelfAttention` makes them, without a mask.

    Args:
        micro_batch_size, seq_length: b in sequences, s in tokens.
    """
    heads, causal = config.padded_heads(tp_size) // tp_size, config.traits.is_causal
    shape = (micro_batch_size, seq_length, heads, 3, config.head_size)
    qkv = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(micro_batch_size, seq_length, heads * config.head_size, dtype=dtype, device=device)

    def forward_and_backward() -> None:
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=config.attention_dropout, is_causal=causal)
        out.transpose(1, 2).flatten(2).backward(grad)

    seconds: dict[str, float] = {}
    for name in BACKENDS:
        # torch says by an error that a backend does not take these inputs, and why by warnings.
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(RuntimeError), only_backend(name):
            seconds[name] = _median_time_s(forward_and_backward, device)
    return choose_fastest(seconds)


def choose_fastest(seconds: dict[str, float]) -> str:
    """The name with the least time; `LEAST_GAIN` keeps noise from choosing between equals. `sdpa` if there is none."""
    chosen = "sdpa"
    for name, time_s in seconds.items():
        if chosen == "sdpa" or time_s < (1 - LEAST_GAIN) * seconds[chosen]:
            chosen = name
    return chosen


def _median_time_s(function: Callable[[], None], device: torch.device) -> float:
    """Median seconds of `CALLS` calls after `WARM_UP` ones, each waited for."""
    seconds = []
    for _ in range(WARM_UP + CALLS):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:])
