"""Two optimizer steps, with the replica check, and one validation step of the pretraining module on fake CUDA tensors.

Runs in its own process: `python fake_step.py GUARD '[{"layout": "tp8", "rank": "last", ...}, ...]'` prints, as JSON,
what `DeviceWatch` recorded for each case. Lightning's Trainer is replaced by its order of calls.
"""

import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_gpu

NUM_STEPS, NUM_MICRO_BATCHES = 2, 2  # the second step finds the moments made and the counters of the first
SAMPLES, LENGTH = 4, 64  # of a micro-batch: sequences, tokens
SIZES = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1000}
FACTORS = {
    "layout": ("tp1", "tp2", "tp8", "tp2 sequence", "tp8 sequence"),
    "data": ("dp1", "dp2", "dp2 zero1"),
    "rank": ("first", "middle", "last"),
    "family": ("gpt", "bert"),
    "norm_order": ("pre", "post"),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "recompute": ("none", "selective", "full"),
    "moments": ("fp32", "bf16"),
    "dropout": (0.0, 0.1),
    "attention": ("sdpa", "exact"),
}
# What the host may wait for, by operation and place.
ALLOWED_SYNCS = {
    ("Event.synchronize", "training/step/counters.py:DeviceCounters.read"): (
        "once per step, for the previous step's counters, which were copied while this one was queued"
    ),
    ("_local_scalar_dense", "parallel/fingerprint.py:first_difference"): "at each check of the replicas, its result",
    ("host to device", "training/callbacks/sample_digest.py:SampleDigest.on_train_start"): "once",
}


class StepOrder:
    """What the module reads of Lightning's Trainer, and the order in which the Trainer calls the module."""

    def __init__(self, context: Any, device: Any) -> None:
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        ranks = SimpleNamespace(any=lambda *flags: flags)
        place = {"parallel": context, "root_device": device, "ranks": ranks}
        self.strategy = SimpleNamespace(**place, model=None, checkpoint_io=TorchCheckpointIO())
        self.accumulate_grad_batches, self.optimizers, self.state = 1, [], SimpleNamespace(fn=None)
        self.precision, self.gradient_clip_algorithm, self.gradient_clip_val, self.callbacks = "32-true", None, None, []
        self.datamodule, self.loggers = None, []

    def build(self, module: Any) -> None:
        """Build model, optimizer and schedule."""
        self.lightning_module, module.trainer = module, self
        with self.strategy.root_device:  # `Strategy.tensor_init_context`
            module.configure_model()
        module._device = self.strategy.root_device  # as `module.to` sets it, which fake parameters do not allow
        built = module.configure_optimizers()
        self.optimizers = [built["optimizer"]]
        self.lr_scheduler_configs = [SimpleNamespace(scheduler=built["lr_scheduler"]["scheduler"])]

    def start(self, module: Any) -> None:
        """The callbacks of training that hold tensors: the data digest, and the replica check that compares it."""
        from lmscale.training.callbacks.replica_sentinel import ReplicaSentinel
        from lmscale.training.callbacks.sample_digest import SampleDigest

        digest = SampleDigest()
        self.callbacks = [digest, ReplicaSentinel(NUM_STEPS, digest, ending=None)]
        for callback in self.callbacks:
            callback.on_train_start(self, module)

    def train(self, module: Any, micro_batches: list[dict]) -> None:
        """One optimizer step."""
        (optimizer,) = self.optimizers

        def closure() -> None:
            module.backward(module.training_step(micro_batches, 0))
            module.configure_gradient_clipping(optimizer)

        for callback in self.callbacks:
            callback.on_train_batch_start(self, module, micro_batches, 0)
        module.optimizer_step(0, 0, optimizer, closure)
        module.lr_schedulers().step()
        for callback in self.callbacks:
            callback.on_train_batch_end(self, module, None, micro_batches, 0)

    def validate(self, module: Any, micro_batch: dict) -> None:
        """One validation step."""
        import torch

        module.eval()
        with torch.no_grad():
            module.validation_step(micro_batch, 0)


def run_step(case: dict) -> dict:
    """Run a case; returns the mixed operations and syncs as (operation, place), and the error that ended it or None."""
    import torch
    from device_watch import DeviceWatch
    from fake_ranks import grid, grid_of
    from planted_faults import planted
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lmscale import partition
    from lmscale.config import TransformerConfig
    from lmscale.config.training import OptimizerConfig, PrecisionConfig
    from lmscale.kernels import Kernels
    from lmscale.training.module import PretrainModule

    dropouts = dict.fromkeys(("hidden_dropout", "attention_dropout"), case["dropout"])
    choices = {name: case[name] for name in ("norm_order", "recompute", "attention")}
    config = TransformerConfig(case["family"], max_position_embeddings=LENGTH, **SIZES, **dropouts, **choices)
    partition.LOGITS_AT_ONCE_ON_GPU = 2**15  # several chunks
    with grid(**grid_of(case)) as context, FakeTensorMode():
        order = StepOrder(context, torch.device("cuda", 0))
        module = PretrainModule(
            config,
            OptimizerConfig(lr=1e-4, moments=case["moments"]),
            precision=PrecisionConfig(case["precision"]),
            kernels=Kernels(float8=case["precision"] == "fp8"),
            logs=False,
        )
        order.build(module)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        micro_batches = [micro_batch(case["family"]) for _ in range(NUM_MICRO_BATCHES)]
        error = None
        with DeviceWatch() as watch, planted(case.get("fault")):
            try:
                order.start(module)
                for _ in range(NUM_STEPS):
                    order.train(module, micro_batches)
                order.validate(module, micro_batches[0])
            except Exception as stopped:  # the report says why
                error = "".join(traceback.format_exception(stopped, limit=-4))
    return {"mixed": sorted(watch.mixed), "syncs": sorted(watch.syncs), "error": error}


def problems_of(found: dict) -> list[str]:
    """What is wrong with a result of `run_step`, in one line each."""
    mixed = [f"{operation} mixes devices in {place}" for operation, place in found["mixed"]]
    syncs = [sync for sync in map(tuple, found["syncs"]) if sync not in ALLOWED_SYNCS]
    waits = [f"the host waits for {operation} in {place}" for operation, place in syncs]
    return mixed + waits + ([found["error"]] if found["error"] else [])


def micro_batch(family: str) -> dict[str, Any]:
    """A micro-batch as the loader gives it, on the device."""
    import torch

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device="cuda")

    batch = {"tokens": ids(SAMPLES, LENGTH), "labels": ids(SAMPLES, LENGTH)}
    batch |= {name: ids(SAMPLES) for name in ("sample_numbers", "sample_indices", "dropout_numbers")}
    if family == "bert":
        batch |= {"token_types": ids(SAMPLES, LENGTH), "sop_labels": ids(SAMPLES), "scored": ids(37)}
        batch["attention_mask"] = torch.ones(SAMPLES, LENGTH, dtype=torch.bool, device="cuda")
    return batch


if __name__ == "__main__":
    fake_gpu.install(Path(sys.argv[1]))
    print(json.dumps([run_step(case) for case in json.loads(sys.argv[2])]))
