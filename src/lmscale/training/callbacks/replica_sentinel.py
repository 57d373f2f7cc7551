"""Compares what ranks must hold alike."""

from typing import Any

import lightning as L

from ...parallel import ParallelContext, fingerprint, first_difference
from ...parallel.pipeline import gather_from_stages
from ...runtime.exit_codes import REPLICAS_DIFFER
from ...runtime.messages import print_error
from ..session import Ending
from ..step.optimizer import MixedPrecisionAdamW
from .sample_digest import SampleDigest


class ReplicaSentinel(L.Callback):
    """Stops the run when ranks that must hold the same numbers do not.

    They are compared before the first step and then every `every_steps` steps: over the tensor group the replicated
    weights, their moments, and which samples were seen; over the data group all weights and moments (with `zero1` only
    the weights: no two data ranks then hold the same moments); over the stages of a pipeline which samples were seen,
    and the word embedding of the first and the last. A difference means broken memory, a broken link or a bug; the
    checkpoint before it is still good. A wrong gradient of a replicated parameter is not found over a group
    whose ranks all take rank 0's (`sync_replicated_gradients`).

    Communicates:
        one all-reduce of 2 int64 per tensor over each group, every `every_steps` steps; two hashes over the stages;
        three numbers over the world.

    Source: the drift of replicated LayerNorms in the BLOOM training (NVIDIA/Megatron-LM pull request 206).
    """

    def __init__(self, every_steps: int, digest: SampleDigest, ending: Ending) -> None:
        self.every_steps, self.digest, self.ending = every_steps, digest, ending

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the weights that all ranks start with."""
        self._check(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Compare after every `every_steps` steps, before the step's checkpoint is saved."""
        if pl_module.completed_steps % self.every_steps == 0:
            self._check(trainer, pl_module)

    def _check(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        context, optimizer = pl_module.parallel, trainer.optimizers[0]
        optimizer.buffer.wait_for_weights()
        specs = {name: master.shard for name, master in zip(optimizer.names, optimizer.masters, strict=True)}
        everything = {key: (tensor, specs[key.split("/", 1)[1]]) for key, tensor in optimizer.tensors().items()}
        weights = {name: (param, param.shard) for name, param in pl_module.model.named_parameters()}
        if optimizer.holds_masters or context.zero1:
            everything |= weights
        replicated = {"sample numbers": self.digest.value}
        replicated |= {name: tensor for name, (tensor, spec) in everything.items() if spec.replicated}
        over_tensor = first_difference(replicated, context.tp_group)
        shared = weights if context.zero1 else everything  # with zero1 each data rank has its own optimizer state
        over_data = first_difference({name: tensor for name, (tensor, _) in shared.items()}, context.dp_group)
        over_stages = self._difference_over_stages(optimizer, context)
        groups = {"tensor": over_tensor, "pipeline": over_stages, "data": over_data}
        if not any(trainer.strategy.ranks.any(*(name is not None for name in groups.values()))):
            return
        for group, name in groups.items():
            if name is not None:
                place = f"tensor rank {context.tp_rank}, stage {context.pp_rank}, data rank {context.dp_rank}"
                print_error(
                    f"after step {pl_module.completed_steps} {name} differs within the {group} group of rank "
                    f"{trainer.global_rank} ({place}); the run stops without saving"
                )
        self.ending.stop(trainer, REPLICAS_DIFFER)

    def _difference_over_stages(self, optimizer: MixedPrecisionAdamW, context: ParallelContext) -> str | None:
        """Which of the samples and the tied word embedding differs between stages, or None."""
        if context.pp_size == 1:
            return None  # the hashes would wait for the device
        own = {"sample numbers": self.digest.value, "the word embedding": optimizer.tied}
        hashes = {name: int(fingerprint(tensor)) for name, tensor in own.items() if tensor is not None}
        of_stages = gather_from_stages(hashes, context)
        return next((n for n in own if len({found[n] for found in of_stages if n in found}) > 1), None)
