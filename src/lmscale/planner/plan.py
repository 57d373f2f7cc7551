"""The cost of a training job on a cluster: bytes, FLOPs, messages, seconds, days, energy."""

from dataclasses import dataclass

from ..config import BatchConfig, Layout, Recompute
from ..config.cluster import Cluster
from .balance import Balance, balance_of
from .communication import Collective, step_collectives
from .flops import hardware_flops_per_step, model_flops_per_step
from .memory import GIB, MemoryEstimate
from .params import count_parameters
from .step_time import AS_TRAINED, StepTime, Techniques, predict_step_time
from .workload import Workload, rank_memory

DAY_S = 86400


@dataclass(frozen=True)
class Plan:
    """The cost of a job in one layout on one cluster.

    Args:
        num_micro_batches: forward passes of a rank in a step.
        num_parameters, rank_parameters: of the model and of one rank.
        memory: bytes of a rank by recomputation mode; `usable_bytes` is what a device offers.
        model_flops, hardware_flops: of a step, all ranks together.
        collectives: of one rank in a step.
        time: seconds of a step, modelled.
        mfu: model FLOPs over the FLOPs of the devices' dense peaks in that time.
    """

    job: Workload
    layout: Layout
    cluster: Cluster
    num_micro_batches: int
    num_parameters: int
    rank_parameters: int
    memory: dict[Recompute, MemoryEstimate]
    usable_bytes: int
    model_flops: int
    hardware_flops: int
    collectives: tuple[Collective, ...]
    time: StepTime
    mfu: float

    @property
    def num_devices(self) -> int:
        """tp_size x dp_size."""
        return self.layout.world_size

    @property
    def recompute(self) -> Recompute:
        """The recomputation mode planned with."""
        return self.job.config.recompute

    @property
    def overrides(self) -> str:
        """The layout as overrides of `train.py` and `plan.py`."""
        return self.job.overrides(self.layout)

    @property
    def needed_bytes(self) -> int:
        """Memory of a rank in the recomputation mode planned with."""
        return self.memory[self.recompute].total

    @property
    def missing_bytes(self) -> int:
        """Bytes by which a rank exceeds its device; 0 or less if it fits."""
        return self.needed_bytes - self.usable_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return self.job.global_batch_size * self.job.seq_length / self.time.total

    @property
    def balance(self) -> Balance:
        """Computing of a step against its messages."""
        return balance_of(self.time.compute, self.collectives, self.layout, self.cluster)

    @property
    def days(self) -> float:
        """Days of the whole run, counting only its steps: no validation, no checkpoints, no restarts."""
        return self.job.num_steps * self.time.total / DAY_S

    @property
    def energy_mwh(self) -> float | None:
        """Energy of the whole run; None if the cluster does not give the power of a device."""
        if self.cluster.watts is None:
            return None
        return self.cluster.watts * self.num_devices * self.days * 24 / 1e6


def make_plan(job: Workload, layout: Layout, cluster: Cluster, techniques: Techniques = AS_TRAINED) -> Plan:
    """Plan `job` in a layout; a rank that does not fit its device is not refused here, see `Plan.missing_bytes`.

    Bytes, FLOPs and messages are of this project's code, whatever software the cluster's step times were measured with:
    on a cluster without a `roofline` the time counts the loss in a quarter of the rows at once, as it was fitted.

    Raises:
        ValueError: more devices than the cluster has; a grid that does not divide the model or the batch; a type that
            the devices do not have.
    """
    if layout.world_size > cluster.num_devices:
        raise ValueError(
            f"`tp_size` x `dp_size` must be at most the {cluster.num_devices:,} devices of {cluster.name}, "
            f"but is {layout.tp_size} x {layout.dp_size}"
        )
    if layout.cuts_sequence and job.seq_length % layout.tp_size:
        raise ValueError(
            f"`data.seq_length` must be a multiple of `tp_size` ({layout.tp_size}) with `sequence_parallel`, "
            f"but is {job.seq_length}"
        )
    layout.check_micro_batch(job.micro_batch_size)
    config, batch = job.config, BatchConfig(job.micro_batch_size, job.global_batch_size, layout.dp_size)
    memory = {mode: rank_memory(job.change(recompute=mode), layout, cluster.is_gpu) for mode in Recompute}
    time = predict_step_time(
        config,
        layout,
        batch.micro_batch_size,
        batch.num_micro_batches,
        job.seq_length,
        job.dtype,
        cluster,
        techniques,
        job.half_moments,
    )
    parameters = count_parameters(config, layout.tp_size, layout.pad_heads)
    model_flops = model_flops_per_step(config, job.seq_length, job.global_batch_size)
    return Plan(
        job=job,
        layout=layout,
        cluster=cluster,
        num_micro_batches=batch.num_micro_batches,
        num_parameters=parameters.total,
        rank_parameters=parameters.per_rank,
        memory=memory,
        usable_bytes=cluster.usable_bytes,
        model_flops=model_flops,
        hardware_flops=hardware_flops_per_step(config, job.seq_length, job.global_batch_size, layout.tp_size),
        collectives=step_collectives(
            config,
            layout,
            batch.micro_batch_size,
            batch.num_micro_batches,
            job.seq_length,
            job.dtype,
            cluster.is_gpu,
        ),
        time=time,
        mfu=model_flops / (time.total * layout.world_size * cluster.peak_flops_per_s(job.dtype)),
    )


def describe_padding(plan: Plan) -> list[str]:
    """Describe the dummy heads of `parallel.pad_heads` and what they cost; nothing if there are none."""
    job, config, tp_size = plan.job, plan.job.config, plan.layout.tp_size
    heads, computed = config.num_attention_heads, config.padded_heads(tp_size)
    if computed == heads:
        return []
    without = hardware_flops_per_step(config, job.seq_length, job.global_batch_size)
    of_model = count_parameters(config)
    padding = plan.rank_parameters - of_model.replicated - of_model.sharded_per_rank / tp_size
    each, memory = computed // tp_size, plan.memory[plan.recompute]
    num_bytes = padding / plan.rank_parameters * (memory.weights + memory.gradients + memory.optimizer_state)
    idle = tp_size - -(-heads // each)
    only = f"; ranks with dummy heads only: {idle}" if idle else ""
    return [
        f"parallel.pad_heads=true: {computed} heads are computed for {heads}, {each} per rank; the {computed - heads} "
        f"dummy heads are {1 - without / plan.hardware_flops:.1%} of the hardware FLOPs and on average "
        f"{num_bytes / GIB:.3f} GiB of a rank's weights, gradients and optimizer state{only}"
    ]


def describe_shortage(plan: Plan) -> str:
    """Describe why a rank does not fit, with both sizes and the difference."""
    return (
        f"a rank needs {plan.needed_bytes / GIB:.1f} GiB, {plan.missing_bytes / GIB:.1f} more than the "
        f"{plan.usable_bytes / GIB:.1f} a {plan.cluster.device} of cluster={plan.cluster.name} leaves"
    )
