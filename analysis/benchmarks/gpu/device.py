"""The requested device of a measurement."""

import torch


def require_device(accelerator: str) -> tuple[torch.device, str]:
    """The device and its name.

    Args:
        accelerator: cpu or gpu.

    Raises:
        ValueError: gpu where torch sees none; the CPU never stands in for it.
    """
    if accelerator == "cpu":
        return torch.device("cpu"), "cpu"
    if not torch.cuda.is_available():
        raise ValueError("`accelerator` must be cpu where torch sees no GPU, but is gpu")
    return torch.device("cuda"), torch.cuda.get_device_name()
