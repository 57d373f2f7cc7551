"""Measure the overhead of Lightning and our callbacks per training step, with a nearly empty step.

    python analysis/benchmarks/lightning_cost.py --record analysis/benchmarks/records/lightning_cost_cpu.json

Trains a GPT of one layer with the code of `src/train.py` and its default callbacks, loggers and progress bar. After
each step, a bare loop takes one step on its own model: next batch, forward pass, backward pass, update. Both therefore
run under the same machine load. The median difference is the overhead. Prints it and writes a record.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import lmscale.cli.conf_files  # noqa: F401  the resolvers of conf/
from lmscale.config.pretrain import RunConfig
from lmscale.models import build_model
from lmscale.parallel import sample_dropout_keys
from lmscale.results import new_record, record_argument, write_record
from lmscale.training import pretrain as pretraining
from lmscale.training.module import PretrainModule
from lmscale.training.step.optimizer import MixedPrecisionAdamW

ROOT = Path(__file__).resolve().parents[2]
WARM_UP_STEPS = 20
SETTINGS = (
    "model=gpt_tiny",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=1",
    "model.max_position_embeddings=16",
    "data.seq_length=8",
    "tokenizer.vocab_size=300",
    "micro_batch_size=1",
    "global_batch_size=1",
    "trainer.num_validation_samples=1",
    "trainer.validate_every_steps=0",
    "trainer.accelerator=cpu",
    "trainer.num_threads=1",
    "checkpoint.save_last=false",
)


class PairedModule(PretrainModule):
    """The module of `train.py`, followed by one step of the bare loop after each step. Times in seconds."""

    def on_train_start(self) -> None:
        self.bare_model = build_model(self.config, self.parallel, seed=self.seed, dtype=torch.float32)
        self.bare_optimizer = MixedPrecisionAdamW(
            self.bare_model.named_parameters(), self.optimizer_config, self.precision, self.parallel
        )
        self.bare_batches = iter(self.trainer.datamodule.step_loader())
        self.harness_times: list[float] = []
        self.bare_times: list[float] = []
        self.resumed_at: float | None = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        started = time.perf_counter()
        if self.resumed_at is not None:
            self.harness_times.append(started - self.resumed_at)
            self.take_bare_step()
            self.bare_times.append(time.perf_counter() - started)
        else:
            self.take_bare_step()
        self.resumed_at = time.perf_counter()

    def take_bare_step(self) -> None:
        """One step of a minimal training loop."""
        batch = next(self.bare_batches)
        self.bare_optimizer.zero_grad()
        keys = sample_dropout_keys(self.seed, batch["sample_numbers"])
        loss = self.bare_model(batch["tokens"], batch["labels"], keys) / batch["labels"].numel()
        loss.backward()
        self.bare_optimizer.step()


def measure(steps: int, overrides: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """Seconds of each step with Lightning, and of the following bare step."""
    with tempfile.TemporaryDirectory() as folder, initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [*overrides, f"trainer.max_steps={steps + WARM_UP_STEPS}"])
        values = OmegaConf.to_container(cfg, resolve=True) | {"run_dir": folder}
        job = pretraining.prepare_job(RunConfig.from_dict(values))
        kept: list[PairedModule] = []

        def make(*args: Any, **kwargs: Any) -> PairedModule:
            kept.append(PairedModule(*args, **kwargs))
            return kept[0]

        original, pretraining.PretrainModule = pretraining.PretrainModule, make
        try:
            if pretraining.pretrain(job) != 0:
                raise RuntimeError("the training failed")
        finally:
            pretraining.PretrainModule = original
    return kept[0].harness_times[WARM_UP_STEPS - 1 :], kept[0].bare_times[WARM_UP_STEPS - 1 :]


def main() -> int:
    """Measure, print the overhead and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="paired steps")
    parser.add_argument("--record", type=record_argument, help="path of the record; none by default")
    options = parser.parse_args()
    if options.steps < 2:
        print(f"error: `--steps` must be at least 2, but is {options.steps}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    harness, bare = measure(options.steps, SETTINGS)
    paired = sorted(a - b for a, b in zip(harness, bare, strict=True))
    metrics = {
        "step": {"value": statistics.median(harness), "unit": "s"},
        "bare_step": {"value": statistics.median(bare), "unit": "s"},
        "overhead": {"value": statistics.median(paired), "unit": "s"},
        "overhead_p10": {"value": paired[len(paired) // 10], "unit": "s"},
        "overhead_p90": {"value": paired[len(paired) * 9 // 10], "unit": "s"},
        "pairs": {"value": len(paired), "unit": "steps"},
    }
    for name, entry in metrics.items():
        scaled = f"{entry['value'] * 1e3:.3f} ms" if entry["unit"] == "s" else f"{entry['value']} {entry['unit']}"
        print(f"{name:<16}{scaled}")
    if options.record is not None:
        layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}
        config = {"overrides": list(SETTINGS)}
        record = new_record("lightning_cost", "run", config, 1234, metrics, device="cpu", layout=layout)
        write_record(record, options.record)
        print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
