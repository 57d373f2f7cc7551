"""The cost of a training job on a cluster: bytes, FLOPs, messages, seconds, days, energy."""

from dataclasses import dataclass
from functools import cached_property

from ..config import Layout, Recompute
from ..config.cluster import Cluster
from ..config.teacher import cache_record_bytes
from .communication import Collective, step_collectives
from .flops import hardware_flops_per_step, model_flops_per_step, teacher_flops
from .memory import GIB, MemoryEstimate, estimate_memory
from .params import ParameterCount, count_parameters
from .step_time import StepRow, StepTime, step_rows
from .workload import Workload

DAY_S = 86400


@dataclass(frozen=True)
class Plan:
    """The cost of a job in one layout on one cluster, each figure computed when it is asked for.

    Bytes, FLOPs, messages and times are of this project's code, whatever software the cluster's rates were fitted to.
    A rank that does not fit its device is not refused, see `missing_bytes`.

    Raises:
        ValueError: more devices than the cluster has; a grid that does not divide the model or the batch.
    """

    job: Workload
    layout: Layout
    cluster: Cluster

    def __post_init__(self) -> None:
        job, layout, cluster = self.job, self.layout, self.cluster
        assert job.on_gpu == cluster.is_gpu
        if layout.world_size > cluster.num_devices:
            raise ValueError(f"{layout.formula} must be at most the {cluster.num_devices:,} devices of {cluster.name}")
        job.check_layout(layout)

    @property
    def recompute(self) -> Recompute:
        """The recomputation mode planned with."""
        return self.job.config.recompute

    @property
    def overrides(self) -> str:
        """The layout as overrides of `train.py` and `plan.py`."""
        return self.job.overrides(self.layout)

    @cached_property
    def parameters(self) -> ParameterCount:
        """Parameters of the model and of one rank."""
        return count_parameters(self.job.config, self.layout)

    @property
    def memory(self) -> dict[Recompute, MemoryEstimate]:
        """Memory of a rank in each recomputation mode."""
        return {job.config.recompute: estimate_memory(job, self.layout) for job in self.job.in_each_mode()}

    @cached_property
    def needed_bytes(self) -> int:
        """Memory of a rank in the recomputation mode planned with."""
        return estimate_memory(self.job, self.layout).total

    @property
    def missing_bytes(self) -> int:
        """Bytes by which a rank exceeds its device; 0 or less if it fits."""
        return self.needed_bytes - self.cluster.usable_bytes

    @property
    def model_flops(self) -> int:
        """Model FLOPs of a step, all ranks together, with those of a teacher."""
        job, sizes = self.job, (self.job.seq_length, self.job.global_batch_size)
        return model_flops_per_step(job.config, *sizes) + teacher_flops(job.models[1:], *sizes)

    @property
    def hardware_flops(self) -> int:
        """FLOPs that the devices execute in a step, all ranks together, with those of a teacher."""
        job, sizes = self.job, (self.job.seq_length, self.job.global_batch_size, self.layout.tp_size)
        return hardware_flops_per_step(job.config, *sizes) + teacher_flops(job.models[1:], *sizes)

    @property
    def teacher(self) -> dict[str, int]:
        """The size of a teacher and its FLOPs of a step, or the bytes of its cache for the whole run; by name."""
        job, found, sizes = self.job, {}, (self.job.seq_length, self.job.global_batch_size)
        for config in job.models[1:]:
            found = {"parameters": count_parameters(config).total, "step_flops": teacher_flops([config], *sizes)}
        if job.top_k is not None:
            rows = max(1, int(job.config.traits.scored_share * job.seq_length))  # BERT masks at most 15 %
            sample = cache_record_bytes(rows, job.top_k, job.config.vocab_size, job.weight_bytes)
            found["cache_bytes"] = sample * job.num_steps * job.global_batch_size
        return found

    @property
    def collectives(self) -> list[Collective]:
        """Collectives of one rank in a step."""
        return step_collectives(self.job, self.layout)

    @cached_property
    def rows(self) -> list[StepRow]:
        """Every operation and message of one rank in a step, with its time."""
        return step_rows(self.job, self.layout, self.cluster)

    @cached_property
    def time(self) -> StepTime:
        """Seconds of a step, modelled."""
        return StepTime.of(self.rows)

    @property
    def mfu(self) -> float:
        """Model FLOPs over the FLOPs of the devices' dense peaks in the time of a step."""
        return self.model_flops / (
            self.time.total * self.layout.world_size * self.cluster.peak_flops_per_s(self.job.dtype)
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return self.job.global_batch_size * self.job.seq_length / self.time.total

    @property
    def days(self) -> float:
        """Days of the whole run, counting only its steps: no validation, no checkpoints, no restarts."""
        return self.job.num_steps * self.time.total / DAY_S

    @property
    def energy_mwh(self) -> float | None:
        """Energy of the whole run; None if the cluster does not give the power of a device."""
        if self.cluster.watts is None:
            return None
        return self.cluster.watts * self.layout.world_size * self.days * 24 / 1e6


def describe_padding(plan: Plan) -> list[str]:
    """Describe the dummy heads of `parallel.pad_heads` and what they cost; nothing if there are none."""
    job, config, tp_size = plan.job, plan.job.config, plan.layout.tp_size
    heads, computed = config.num_attention_heads, config.padded_heads(tp_size)
    if computed == heads:
        return []
    sizes = job.seq_length, job.global_batch_size
    without = hardware_flops_per_step(config, *sizes) + teacher_flops(job.models[1:], *sizes, tp_size)
    of_model, of_rank = count_parameters(config), plan.parameters.per_rank
    padding = of_rank - of_model.replicated - of_model.sharded_per_rank / tp_size
    each, memory = computed // tp_size, estimate_memory(job, plan.layout)
    num_bytes = padding / of_rank * (memory.weights + memory.gradients + memory.optimizer_state)
    idle = tp_size - -(-heads // each)
    only = f"; ranks with dummy heads only: {idle}" if idle else ""
    return [
        f"parallel.pad_heads=true: {computed} heads are computed for {heads}, {each} per rank; the {computed - heads} "
        f"dummy heads are {1 - without / plan.hardware_flops:.1%} of the hardware FLOPs and on average "
        f"{num_bytes / GIB:.3f} GiB of a rank's weights, gradients and optimizer state{only}"
    ]


def describe_stages(plan: Plan) -> list[str]:
    """Describe the stages of a pipeline and for how long each is idle; nothing if there is one."""
    stages = plan.layout.pp_size
    if stages == 1:
        return []
    num = plan.job.num_micro_batches(plan.layout)
    return [
        f"stages of {plan.job.config.describe_stages(stages)} layers, each idle for "
        f"{plan.time.idle / plan.time.total:.0%} of a step of {num} micro-batch{'es' * (num > 1)}; "
        "memory is of the stage that needs most, time of the slowest, and the messages are of the first"
    ]


def describe_shortage(plan: Plan) -> str:
    """Describe why a rank does not fit, with both sizes and the difference."""
    return (
        f"a rank needs {plan.needed_bytes / GIB:.1f} GiB, {plan.missing_bytes / GIB:.1f} more than the "
        f"{plan.cluster.usable_bytes / GIB:.1f} that each {plan.cluster.device} of cluster={plan.cluster.name} leaves"
    )
