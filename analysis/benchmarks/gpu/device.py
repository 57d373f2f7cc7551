"""The requested device of a measurement."""

import torch


def require_device(accelerator: str) -> tuple[torch.device, str]:
    """Return the device and its name.

    Args:
        accelerator: cpu or gpu.

    Raises:
        ValueError: `gpu` on a machine without one; the CPU is never used instead.
    """
    if accelerator == "cpu":
        return torch.device("cpu"), "cpu"
    if not torch.cuda.is_available():
        raise ValueError("`accelerator` must be cpu if torch finds no GPU, but is gpu")
    return torch.device("cuda"), torch.cuda.get_device_name()
