"""The Lightning strategy that builds the (data, tensor) grid of ranks."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ..config import ParallelConfig
from ..parallel import ParallelContext
from .checkpoint import load_checkpoint, remove_checkpoint, save_checkpoint


class TensorParallelStrategy(DDPStrategy):
    """Data parallelism over groups of tensor-parallel ranks (Figure 8).

    The module builds its own shard in `configure_model`, from `strategy.parallel`. Gradients are averaged by torch's
    DDP over the data group alone; everything inside a tensor group is the model's business.

    With 8 ranks and tp_size 2: tensor groups [0, 1], [2, 3], [4, 5], [6, 7]; data groups [0, 2, 4, 6], [1, 3, 5, 7].

    Args:
        layout: sizes of the grid; their product must be the world size.
        timeout_minutes: how long a collective may wait before the run fails.

    Raises:
        ValueError: the world size is not tp_size x dp_size.

    Source: section 3, appendix B.1.
    """

    def __init__(self, layout: ParallelConfig, timeout_minutes: float = 30.0, **kwargs: Any) -> None:
        super().__init__(
            timeout=timedelta(minutes=timeout_minutes), gradient_as_bucket_view=True, broadcast_buffers=False, **kwargs
        )
        self.layout = layout
        self.parallel = ParallelContext()

    def setup_environment(self) -> None:
        """Start the process group, check the world, make the groups."""
        super().setup_environment()
        if self.world_size != self.layout.world_size:
            raise ValueError(
                f"the world size must be `tp_size` x `dp_size` ({self.layout.tp_size} x {self.layout.dp_size}), "
                f"but is {self.world_size}"
            )
        mesh = init_device_mesh(
            self.root_device.type,
            (self.layout.dp_size, self.layout.tp_size),
            mesh_dim_names=("data", "tensor"),
        )
        self.parallel = ParallelContext(
            tp_rank=mesh.get_local_rank("tensor"),
            tp_size=self.layout.tp_size,
            dp_rank=mesh.get_local_rank("data"),
            dp_size=self.layout.dp_size,
            tp_group=mesh.get_group("tensor"),
            dp_group=mesh.get_group("data"),
        )
        # Without its own group DDP would overwrite every shard with rank 0's.
        self._ddp_kwargs["process_group"] = self.parallel.dp_group

    def setup(self, trainer: Any) -> None:
        """Move the shard to its device and, for training, wrap it in DDP over the data group and make the optimizer.

        DDPStrategy's own version broadcasts rank 0's weights over the world when it does not train, which would give
        every tensor rank the same shard.
        """
        self.accelerator.setup(trainer)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            if self.parallel.dp_size > 1:
                self.configure_ddp()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def teardown(self) -> None:
        """Unwrap the module. Unlike Lightning's own, leave weights and optimizer where they are: a shard with its
        moments may not fit the host's memory, and nothing here needs it there."""
        self.model = self.lightning_module
        self.cluster_environment.teardown()
        self.accelerator.teardown()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """A sampler deals over the data ranks; tensor ranks see the same samples."""
        return {"num_replicas": self.parallel.dp_size, "rank": self.parallel.dp_rank}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data group (tensor ranks hold equal values)."""
        return super().reduce(tensor, group=group or self.parallel.dp_group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over the world: every rank (`all`) or any rank says yes."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """This rank's shard of the model by parameter name."""
        return dict(self.lightning_module.model.named_parameters())

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Copy a loaded shard into the model."""
        self.lightning_module.model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """All ranks together: write shards and metadata, then give the directory its final name."""
        save_checkpoint(checkpoint, filepath, self.lightning_module, self.parallel)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this rank's shard, whatever layout wrote it."""
        return load_checkpoint(checkpoint_path, self.lightning_module, self.parallel)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint directory (rank 0 does)."""
        if self.is_global_zero:
            remove_checkpoint(filepath)
