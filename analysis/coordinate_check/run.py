"""Does a model's best learning rate transfer over width and depth? Measures how far its activations move as it grows.

A parametrization that transfers moves every activation equally far at every size (Yang et al. 2022, appendix D.1). The
model is trained a few steps on one batch of random tokens, at several widths and at several depths, with the heads and
the base sizes of the configuration. For each part the mean of |x after - x before| is fitted by a power of the size.
The check passes if no power is further from 0 than `--bound`. Of the configuration only `model` and `optimizer` are
used.

python analysis/coordinate_check/run.py model=gpt_tiny model.parametrization=completep
python analysis/coordinate_check/run.py --widths 128 256 512 --depths 2 4 8 --output mine.png model=bert_tiny \
    model.parametrization=mup optimizer.lr=2e-3

Not seen by this check: the weight decay.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

import lmscale.cli.conf_files  # noqa: F401  # the resolver that conf/train.yaml uses
from analysis.report.records import ANALYSIS
from analysis.report.style import house_style, page_figure
from lmscale.cli.errors import exit_with
from lmscale.config import TransformerConfig
from lmscale.config.family import load
from lmscale.config.pretrain import RunConfig
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.results import record_argument
from lmscale.training.step.optimizer import MixedPrecisionAdamW

VOCABULARY, SEQUENCES, TOKENS = 256, 8, 64  # the batch, at most as long as the model's positions
ALONE = ParallelContext()
FIGURES = (".png", ".pdf", ".svg")


def read_config(overrides: list[str]) -> RunConfig:
    """The configuration of `train.py` with these overrides."""
    with initialize_config_dir(str(ANALYSIS.parent / "conf"), version_base="1.3"):
        values = OmegaConf.to_container(compose("train", overrides), resolve=True)
    return RunConfig.from_dict(values | {"run_dir": "unused"})


def resized(config: RunConfig, hidden_size: int, num_layers: int) -> TransformerConfig:
    """The configured model at a different width and depth, with heads of the same size and without dropout."""
    model, bases = config.model, {}
    if hidden_size % model.head_size:
        raise ValueError(f"a width must be a multiple of the head size ({model.head_size}), but is {hidden_size}")
    if model.parametrization != "standard":
        bases["base_hidden_size"] = model.base_hidden_size or model.hidden_size
        if model.scaling.scales_depth:
            bases["base_num_layers"] = model.base_num_layers or model.num_layers
        bases["base_head_size"] = model.base_head_size or model.head_size
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers}
    sizes["num_attention_heads"] = hidden_size // model.head_size
    off = dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), 0.0)
    changed = dataclasses.replace(model, **sizes, **bases, **off, vocab_size=VOCABULARY, vocab_multiple=1)
    return changed.resolve(VOCABULARY)


def random_batch(config: TransformerConfig, seed: int) -> dict[str, Any]:
    """What the losses of all families read: random tokens and labels, [b, s]."""
    generator = torch.Generator().manual_seed(seed)
    shape = SEQUENCES, min(TOKENS, config.max_position_embeddings)
    tokens, labels = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
    batch = {"tokens": tokens, "labels": labels, "token_types": torch.zeros_like(tokens), "attention_mask": None}
    return batch | {"sop_labels": labels[:, 0] % 2, "scored": torch.arange(labels.numel())}


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are compared."""
    layers = model.transformer.layers
    ends = {"first": layers[0], "last": layers[-1]}
    found = {f"{end} {name}": getattr(layer, name) for end, layer in ends.items() for name in ("attention", "mlp")}
    return found | {"last layer": layers[-1]}


def moves(config: TransformerConfig, optimizer: OptimizerConfig, seed: int, steps: int, readout_steps: int) -> dict:
    """Mean |x after - x before| of each part after `steps` steps, and of the logits after `readout_steps`."""
    model = build_model(config, ALONE, seed=seed)
    settings = dataclasses.replace(optimizer, max_grad_norm=None)
    updates = MixedPrecisionAdamW(model.named_parameters(), settings, PrecisionConfig("fp32"), ALONE)
    for group in updates.param_groups:
        group["lr"] = optimizer.lr * group["rate_factor"]
    batch, loss = random_batch(config, seed), load(config.traits.loss)
    outputs: dict[str, Tensor] = {}
    for name, module in parts_of(model).items():
        module.register_forward_hook(lambda module, inputs, output, name=name: outputs.update({name: output.detach()}))

    def probe() -> dict[str, Tensor]:
        with torch.no_grad():
            # Of the labels: what is learned. Those of other words move by chance too, less the wider the model is.
            logits = loss.token_logits(model, batch).gather(-1, batch["labels"].unsqueeze(-1))
            return {"logits": logits} | {name: output.clone() for name, output in outputs.items()}

    before, found = probe(), {}
    for step in range(1, max(steps, readout_steps) + 1):
        updates.zero_grad()
        (loss.loss_sums(model, batch, None) / loss.loss_counts(batch)).sum().backward()
        updates.step()
        if step in (steps, readout_steps):
            now = probe()
            names = [name for name in now if step == (readout_steps if name == "logits" else steps)]
            found |= {name: (now[name] - before[name]).abs().mean().item() for name in names}
    return found


def slope(sizes: Iterable[float], values: Iterable[float]) -> float:
    """The power p of the fit value = c size^p."""
    return float(np.polyfit(np.log(list(sizes)), np.log(list(values)), 1)[0])


def check(config: RunConfig, widths: list[int], depths: list[int], seeds: int, steps: int, readout_steps: int) -> list:
    """One row per axis and part: the moves at each size, averaged over the seeds, and their power."""
    model, rows = config.model, []
    shallow = min(depths, default=model.num_layers)
    grid = {"width": [(w, shallow) for w in widths], "depth": [(model.hidden_size, d) for d in depths]}
    for axis, sizes in grid.items():
        by_size = []
        for size in sizes:
            runs = [moves(resized(config, *size), config.optimizer, s, steps, readout_steps) for s in range(seeds)]
            by_size.append({name: float(np.mean([run[name] for run in runs])) for name in runs[0]})
            still = [name for name, value in by_size[-1].items() if not 0 < value < math.inf]
            if still:
                raise ValueError(
                    f"`optimizer.lr` must move every part by a finite distance, but with {config.optimizer.lr:g} the "
                    f"{still[0]} moves by {by_size[-1][still[0]]} at hidden size {size[0]} and {size[1]} layers"
                )
        lengths = [size[axis == "depth"] for size in sizes]
        for name in by_size[0] if by_size else ():
            values = [found[name] for found in by_size]
            rows.append(
                {"axis": axis, "part": name, "sizes": lengths, "moves": values, "power": slope(lengths, values)}
            )
    return rows


def draw(rows: list[dict], bound: float, title: str, path: Path) -> None:
    """A panel per axis, a line per part, with the verdict on each."""
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    with house_style():
        figure = page_figure(title, 3.8)
        for panel, axis in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
            for row in (row for row in rows if row["axis"] == axis):
                label = f"{row['part']}: {row['power']:+.2f} {'pass' if abs(row['power']) <= bound else 'FAIL'}"
                panel.loglog(row["sizes"], row["moves"], marker="o", label=label)
            panel.set(xlabel=axis, ylabel="mean |x after - x before|")
            panel.set_xticks(row["sizes"], row["sizes"])
            panel.minorticks_off()
            panel.legend(title="power of the size", fontsize="small")
        figure.savefig(path)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {text}")
    return number


def main() -> None:
    """Measure, print the table, draw it; exit code 1 if a part fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=_positive, nargs="*", default=[64, 128, 256, 512], help="hidden sizes")
    parser.add_argument(
        "--depths",
        type=_positive,
        nargs="*",
        help="numbers of layers; by default 2 4 8 16, with mup none: it has no depth rule",
    )
    parser.add_argument("--steps", type=_positive, default=10, help="training steps before the comparison")
    parser.add_argument(
        "--readout-steps", type=_positive, default=30, help="the same for the logits, which settle later"
    )
    parser.add_argument("--seeds", type=_positive, default=3)
    parser.add_argument("--bound", type=float, default=0.3, help="largest power of the size that passes")
    parser.add_argument(
        "--output",
        type=record_argument,
        default=ANALYSIS.parent / "outputs" / "coordinate_check.png",
        help="figure; the record is beside it",
    )
    own, overrides = parser.parse_known_args()
    try:
        config = read_config(overrides)
        if own.depths is None:
            own.depths = [] if config.model.parametrization == "mup" else [2, 4, 8, 16]
        if own.output.suffix not in FIGURES:
            raise ValueError(f"`--output` must end in {', '.join(FIGURES)}, but is {own.output}")
        for name, sizes in (("--widths", own.widths), ("--depths", own.depths)):
            if len(set(sizes)) == 1:
                raise ValueError(f"`{name}` must have at least two sizes or none, but has {sizes[0]}")
        if not own.widths and not own.depths:
            raise ValueError("`--widths` or `--depths` must have sizes, but both have none")
        for width in own.widths:
            resized(config, width, config.model.num_layers)
        rows = check(config, own.widths, own.depths, own.seeds, own.steps, own.readout_steps)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        exit_with(error)
    failed = [row for row in rows if abs(row["power"]) > own.bound]
    for row in rows:
        values = "  ".join(f"{value:9.4f}" for value in row["moves"])
        verdict = "FAIL" if row in failed else "pass"
        print(f"{row['axis']:6}{row['part']:17}{values}   power {row['power']:+.2f}  {verdict}")
    name = f"{config.model.name}, {config.model.parametrization}, lr {config.optimizer.lr:g}"
    found = f"{len(failed)} of {len(rows)} parts change with the size" if failed else "all parts move equally far"
    title = f"{name}: {found}"
    own.output.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, own.bound, title, own.output)
    own.output.with_suffix(".json").write_text(json.dumps({"model": config.model.to_dict(), "rows": rows}, indent=1))
    print(f"{title}\nfigure: {own.output}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
