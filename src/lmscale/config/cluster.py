"""Clusters: data-sheet values of their devices, and how fast training runs on them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .checks import AboveZero, AtLeastZero, Checked, Positive, require
from .from_dict import build

DTYPES = ("fp64", "fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Peaks(Checked):
    """Dense matrix-product peaks of one device in TFLOP/s; None if it does not have the type.

    Args:
        fp64: of fp64 products.
        fp32: of fp32 products.
        bf16: of bf16 products.
        fp16: of fp16 products.
        fp8: of float8 products.
        tf32: of fp32 products if `trainer.matmul_precision` lets them run in TF32; not a type itself.
    """

    fp64: AboveZero | None = None
    fp32: AboveZero | None = None
    bf16: AboveZero | None = None
    fp16: AboveZero | None = None
    fp8: AboveZero | None = None
    tf32: AboveZero | None = None


@dataclass(frozen=True)
class Calibration(Checked):
    """How fast messages travel on a cluster, and where the constants of its step times come from.

    Args:
        evidence: `fitted` to published step times, `measured`, or `modelled`: carried over from another machine.
        tensor_bandwidth_gb_s: of an all-reduce between the devices of a node, bytes each way, 10^9 per second.
        data_bandwidth_gb_s: of the gradients' all-reduce between nodes.
        sources: of the figures.
        expected_error: measured over modelled step times of runs outside the fit; every plan prints it.
    """

    evidence: Literal["fitted", "measured", "modelled"]
    tensor_bandwidth_gb_s: AboveZero
    data_bandwidth_gb_s: AboveZero
    sources: str
    expected_error: str = "unknown, because no run was compared"


@dataclass(frozen=True)
class Roofline(Checked):
    """How fast single kernels run on a device: what the time of every operation follows from.

    Args:
        product_tflops: rate of large bf16 (on a V100 fp16) products; other types in the proportion of the peaks.
        float8_tflops: of large float8 products, measured; null: none.
        copy_gb_s: of a large copy, read and written bytes together, measured.
        attention_forward_tflops: of a fused attention core: head size 128, long sequences, not causal; published.
        attention_backward_tflops: of its backward pass.
        product_share: of `product_tflops` that large products reach in a training step; fitted.
        memory_share: of `copy_gb_s` that element-wise kernels reach; observed or fitted.
        launch_us: microseconds between the end of a kernel and the start of the next; observed or fitted.
    """

    product_tflops: AboveZero
    copy_gb_s: AboveZero
    attention_forward_tflops: AboveZero
    attention_backward_tflops: AboveZero
    product_share: AboveZero
    memory_share: AboveZero
    launch_us: AtLeastZero
    float8_tflops: AboveZero | None = None


@dataclass(frozen=True)
class Cluster(Checked):
    """`cluster=`: a cluster of equal devices; `cluster.path=FILE` reads all these keys from a file of your own.

    Args:
        name: short name.
        device: name of one device.
        is_gpu: false for processes on CPUs.
        num_devices: largest number that one job may use.
        devices_per_node: devices that share the fast links.
        memory_gib: of one device, 2^30 bytes.
        reserved_gib: part of it used by the framework, its context and fragmentation.
        latency_us: of one all-reduce.
        watts: of one device with its share of the node under load; None: no energy is predicted.
        peaks: matrix-product rates.
        calibration: rates of messages, and the sources of all rates.
        roofline: rates of single kernels.

    Raises:
        ValueError: an invalid value.
    """

    name: str
    device: str
    is_gpu: bool
    num_devices: Positive
    devices_per_node: Positive
    memory_gib: AboveZero
    reserved_gib: AtLeastZero
    latency_us: AtLeastZero
    peaks: Peaks
    calibration: Calibration
    roofline: Roofline
    watts: AboveZero | None = None

    def check_rules(self) -> None:
        rule = f"at least 0 and below `memory_gib` ({self.memory_gib})"
        require(self, "reserved_gib", rule, self.reserved_gib < self.memory_gib)
        if not self.dtypes:
            raise ValueError("`peaks` must name the rate of one type at least, but all are null")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types the devices have matrix products for."""
        return tuple(dtype for dtype in DTYPES if getattr(self.peaks, dtype) is not None)

    @property
    def usable_bytes(self) -> int:
        """Memory of one device that tensors may take."""
        return int((self.memory_gib - self.reserved_gib) * 2**30)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak of one device in FLOP/s.

        Raises:
            ValueError: the devices have no such type.
        """
        peak = getattr(self.peaks, dtype)
        if peak is None:
            raise ValueError(
                f"`precision.dtype` must be one of {', '.join(self.dtypes)} on {self.name} ({self.device}), "
                f"but is {dtype}"
            )
        return peak * 1e12

    def product_flops_per_s(self, dtype: str) -> float:
        """FLOP/s of large products in a training step.

        Raises:
            ValueError: the devices have no such type.
        """
        rates = self.roofline
        if dtype == "fp8" and rates.float8_tflops is not None:
            return rates.float8_tflops * 1e12 * rates.product_share
        return rates.product_tflops * 1e12 * rates.product_share * self._relative_peak(dtype)

    def attention_flops_per_s(self, dtype: str, backward: bool) -> float:
        """FLOP/s of a fused attention core on long sequences; with fp8 it computes in bf16."""
        rates = self.roofline
        tflops = rates.attention_backward_tflops if backward else rates.attention_forward_tflops
        return tflops * 1e12 * self._relative_peak("bf16" if dtype == "fp8" else dtype)

    def _relative_peak(self, dtype: str) -> float:
        half = next((half for half in ("bf16", "fp16") if getattr(self.peaks, half) is not None), dtype)
        return self.peak_flops_per_s(dtype) / self.peak_flops_per_s(half)

    def bandwidth(self, num_devices: int) -> float:
        """Bytes per second of an all-reduce among neighbours: fast links within a node, the network beyond it."""
        inside = num_devices <= self.devices_per_node
        rate = self.calibration.tensor_bandwidth_gb_s if inside else self.calibration.data_bandwidth_gb_s
        return rate * 1e9


def load_cluster(path: Path) -> Cluster:
    """Read a cluster from a file, of conf/cluster or the user's own.

    Raises:
        ValueError: no such file, not YAML with keys, or an invalid key or value.
    """
    return build(Cluster, read_cluster(path), "cluster.")


def read_cluster(path: Path) -> dict:
    """The keys of a cluster's file, without `path`."""
    import yaml  # only for a file of the user: Hydra has read the others

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"`cluster.path` must be a file that can be read, but is {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = f" line {error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        raise ValueError(f"`cluster.path` must be a YAML file, but {path}{where} is not") from None
    if not isinstance(values, dict):
        raise ValueError(f"`cluster.path` must be a YAML file of keys as in conf/cluster, but is {path}")
    return {key: value for key, value in values.items() if key != "path"}
