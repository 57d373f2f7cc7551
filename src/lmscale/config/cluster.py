"""Clusters: data-sheet values of their devices, and how fast training runs on them."""

from dataclasses import dataclass, fields
from pathlib import Path

from .checks import require_above_zero, require_not_negative, require_one_of, require_positive
from .from_dict import build

DTYPES = ("fp64", "fp32", "bf16", "fp16", "fp8")
EVIDENCE = ("fitted", "measured", "modelled")


@dataclass(frozen=True)
class Peaks:
    """Dense matrix-product peaks of one device in TFLOP/s; None if it does not have the type.

    Args:
        fp64: of fp64 products.
        fp32: of fp32 products.
        bf16: of bf16 products.
        fp16: of fp16 products.
        fp8: of float8 products.
        tf32: of fp32 products if `trainer.matmul_precision` lets them run in TF32; not a type itself.
    """

    fp64: float | None = None
    fp32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    tf32: float | None = None

    def __post_init__(self) -> None:
        require_above_zero(self, *(spec.name for spec in fields(self) if getattr(self, spec.name) is not None))


@dataclass(frozen=True)
class Calibration:
    """How fast messages travel on a cluster, and where the constants of its step times come from.

    Args:
        evidence: `fitted` to published step times, `measured`, or `modelled`: carried over from another machine.
        tensor_bandwidth_gb_s: of an all-reduce between the devices of a node, bytes each way, 10^9 per second.
        data_bandwidth_gb_s: of the gradients' all-reduce between nodes.
        sources: of the figures.
        expected_error: measured over modelled step times of runs that were not fitted; every plan prints it.
    """

    evidence: str
    tensor_bandwidth_gb_s: float
    data_bandwidth_gb_s: float
    sources: str
    expected_error: str = "unknown, because no run was compared"

    def __post_init__(self) -> None:
        require_one_of(self, "evidence", EVIDENCE)
        require_above_zero(self, "tensor_bandwidth_gb_s", "data_bandwidth_gb_s")


@dataclass(frozen=True)
class Roofline:
    """How fast single kernels run on a device: what the time of every operation follows from.

    Args:
        product_tflops: rate of large bf16 (on a V100 fp16) products; other types in the proportion of the peaks.
        float8_tflops: of large float8 products, measured; null: none.
        copy_gb_s: of a large copy, read and written bytes together, measured.
        attention_forward_tflops: of a fused attention core: head size 128, long sequences, not causal; published.
        attention_backward_tflops: of its backward pass.
        product_share: of `product_tflops` that large products reach in a training step; fitted.
        memory_share: of `copy_gb_s` that element-wise kernels reach; fitted.
        launch_us: microseconds between the end of a kernel and the start of the next; fitted.
    """

    product_tflops: float
    copy_gb_s: float
    attention_forward_tflops: float
    attention_backward_tflops: float
    product_share: float
    memory_share: float
    launch_us: float
    float8_tflops: float | None = None

    def __post_init__(self) -> None:
        require_above_zero(self, "product_tflops", "copy_gb_s", "product_share", "memory_share")
        require_above_zero(self, "attention_forward_tflops", "attention_backward_tflops")
        require_not_negative(self, "launch_us")


@dataclass(frozen=True)
class Cluster:
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
    num_devices: int
    devices_per_node: int
    memory_gib: float
    reserved_gib: float
    latency_us: float
    peaks: Peaks
    calibration: Calibration
    roofline: Roofline
    watts: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "num_devices", "devices_per_node")
        require_above_zero(self, "memory_gib")
        if not 0 <= self.reserved_gib < self.memory_gib:
            raise ValueError(
                f"`reserved_gib` must be at least 0 and below `memory_gib` ({self.memory_gib}), "
                f"but is {self.reserved_gib!r}"
            )
        require_not_negative(self, "latency_us")
        if self.watts is not None:
            require_above_zero(self, "watts")
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
