"""Time of the host, which launches the kernels of a step one by one while the device works."""

from ..config import Layout
from .params import rank_buffer, stage_placements
from .workload import Workload

# Thread time on an Intel Xeon (nominally 2.3 GHz) with compiled layers, `analysis/benchmarks/host_time.py`. The driver
# of a GPU and the calls of messages are left out.
FORWARD_S, BACKWARD_S = 0.450e-3, 0.425e-3  # per layer; the backward pass with the hooks that move its gradients
MICRO_BATCH_S = 1.4e-3  # per micro-batch, of embeddings and loss
PARAMETER_S = 4.6e-6  # per parameter, or part of one, that the rank updates
STEP_S = 0.68e-3  # per step


def host_s(job: Workload, layout: Layout, stage: int = 0) -> float:
    """Seconds for which the host of a rank is busy in one optimizer step."""
    layer = FORWARD_S * (2 if job.config.recompute == "full" else 1) + BACKWARD_S
    micro_batch = MICRO_BATCH_S + len(stage_placements(job.config, layout, stage)) * layer
    micro_batch += FORWARD_S * sum(teacher.num_layers for teacher in job.models[1:])
    buffer = rank_buffer(job.config, layout, job.on_gpu, stage)
    # With ZeRO stage 1 the part of each piece begins within a parameter.
    num_updated = len(buffer.starts) / buffer.num_cuts + buffer.num_pieces * layout.cuts_optimizer
    return job.num_micro_batches(layout) * micro_batch + num_updated * PARAMETER_S + STEP_S
