"""Does a model's best learning rate transfer over its sizes? Measures how far its activations move as it grows.

A parametrization that transfers moves every activation equally far at every size (Yang et al. 2022, appendix D.1). The
model is trained a few steps on one batch of random tokens, at several widths (with more heads), depths and head sizes
(with fewer heads), with the base sizes of the configuration. For each part the mean of |x after - x before| is fitted
by a power of the size. The check passes if no power is further from 0 than `--bound`. Of the configuration only `model`
and `optimizer` are used.

python analysis/coordinate_check/run.py model=gpt_tiny model.initializer_std=0.02 model.parametrization=completep
python analysis/coordinate_check/run.py --widths 128 256 512 --depths 2 4 8 --output mine.png model=bert_tiny \
    model.parametrization=mup optimizer.lr=2e-3

Not seen by this check: the weight decay.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable
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
from analysis.coordinate_check.figure import draw_moves
from analysis.report.records import ANALYSIS, add_line, read_lines
from analysis.report.style import prepare_figure
from analysis.running import positive
from lmscale.cli.errors import exit_with
from lmscale.config import TransformerConfig
from lmscale.config.family import load
from lmscale.config.pretrain import RunConfig
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.results import new_record, path_argument, record_argument
from lmscale.training.step.optimizer import MixedPrecisionAdamW

# Fewer positions than a head has numbers. What many positions do to a weight does not add up but averages out, by the
# root of the size: with 512 positions narrow models moved differently in the right parametrization too.
VOCABULARY, SEQUENCES, TOKENS = 256, 1, 8
READOUTS = ("logits", "sentence order")
ALONE = ParallelContext()


def read_config(overrides: list[str]) -> RunConfig:
    """The configuration of `train.py` with these overrides."""
    with initialize_config_dir(str(ANALYSIS.parent / "conf"), version_base="1.3"):
        values = OmegaConf.to_container(compose("train", overrides), resolve=True)
    return RunConfig.from_dict(values | {"run_dir": "unused"})


def resized(config: RunConfig, hidden_size: int, num_layers: int, head_size: int) -> TransformerConfig:
    """The configured model at different sizes, without dropout."""
    model, bases = config.model, {}
    if hidden_size % head_size:
        raise ValueError(f"a width must be a multiple of the head size ({head_size}), but is {hidden_size}")
    if model.parametrization != "standard":
        bases["base_hidden_size"] = model.base_hidden_size or model.hidden_size
        if model.scaling.scales_depth:
            bases["base_num_layers"] = model.base_num_layers or model.num_layers
        bases["base_head_size"] = model.base_head_size or model.head_size
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers}
    sizes["num_attention_heads"] = hidden_size // head_size
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


def parts_of(model: nn.Module) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The modules whose outputs are compared, and what is compared of the output."""
    layers, found = model.transformer.layers, {}

    def scores(attention: nn.Module, qkv: Tensor) -> Tensor:
        return attention.scores(*attention.split_heads(qkv)[:2])

    for end, layer in {"first": layers[0], "last": layers[-1]}.items():
        found[f"{end} scores"] = layer.attention.qkv, functools.partial(scores, layer.attention)
        found |= {f"{end} {name}": (getattr(layer, name), Tensor.clone) for name in ("attention", "mlp")}
    if hasattr(model, "order_head"):
        found["sentence order"] = model.order_head, Tensor.clone
    return found | {"last layer": (layers[-1], Tensor.clone)}


def moves(config: TransformerConfig, optimizer: OptimizerConfig, seed: int, steps: int, readout_steps: int) -> dict:
    """Mean |x after - x before| of each part after `steps` steps, and of the readouts after `readout_steps`."""
    model = build_model(config, ALONE, seed=seed)
    with torch.no_grad():  # queries of 0, as their limit is: drawn ones shrink with the head (Yang et al. 2022, D.2)
        for attention in (layer.attention for layer in model.transformer.layers):
            attention.qkv.weight.view(-1, 3, attention.head_size, config.hidden_size)[:, 0] = 0.0
    settings = dataclasses.replace(optimizer, max_grad_norm=None)
    updates = MixedPrecisionAdamW(model.named_parameters(), settings, PrecisionConfig("fp32"), ALONE)
    for group in updates.param_groups:
        group["lr"] = optimizer.lr * group["rate_factor"]
    batch, loss = random_batch(config, seed), load(config.traits.loss)
    outputs: dict[str, Tensor] = {}
    for name, (module, part) in parts_of(model).items():
        module.register_forward_hook(
            lambda _, inputs, output, name=name, part=part: outputs.update({name: part(output)})
        )

    def probe() -> dict[str, Tensor]:
        with torch.no_grad():
            # Of the labels: what is learned. Those of other words move by chance too, less the wider the model is.
            logits = loss.token_logits(model, batch).gather(-1, batch["labels"].unsqueeze(-1))
            return {"logits": logits, **outputs}

    before, found = probe(), {}
    for step in range(1, max(steps, readout_steps) + 1):
        updates.zero_grad()
        (loss.loss_sums(model, batch, None) / loss.loss_counts(batch)).sum().backward()
        updates.step()
        if step in (steps, readout_steps):
            now = probe()
            names = [name for name in now if step == (readout_steps if name in READOUTS else steps)]
            found |= {name: (now[name] - before[name]).abs().mean().item() for name in names}
    return found


def slope(sizes: Iterable[float], values: Iterable[float]) -> float:
    """The power p of the fit value = c size^p."""
    return float(np.polyfit(np.log(list(sizes)), np.log(list(values)), 1)[0])


def check(config: RunConfig, axes: dict[str, list[int]], seeds: int, steps: int, readout_steps: int) -> list[dict]:
    """One row per axis and part: the moves at each size, averaged over the seeds, and their power.

    Args:
        axes: the sizes by `width`, `depth` and `head size`; the others are then those of the model, with the least
            depth.
    """
    model, rows = config.model, []
    own = {"width": model.hidden_size, "depth": min(axes["depth"], default=model.num_layers)}
    own["head size"] = model.head_size

    @functools.cache
    def moves_at(size: tuple[int, ...]) -> dict[str, float]:
        runs = [moves(resized(config, *size), config.optimizer, s, steps, readout_steps) for s in range(seeds)]
        found = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
        still = [name for name, value in found.items() if not 0 < value < math.inf]
        if still:
            raise ValueError(
                f"`optimizer.lr` must move every part by a finite distance, but with {config.optimizer.lr:g} the "
                f"{still[0]} moves by {found[still[0]]} at hidden size {size[0]} and {size[1]} layers"
            )
        return found

    for axis, lengths in axes.items():
        by_size = [moves_at(tuple((own | {axis: length}).values())) for length in lengths]
        for name in by_size[0] if by_size else ():
            values = [found[name] for found in by_size]
            rows.append(
                {"axis": axis, "part": name, "sizes": lengths, "moves": values, "power": slope(lengths, values)}
            )
    return rows


def main() -> None:
    """Measure, print the table, draw it; exit code 1 if a part fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=positive, nargs="*", default=[64, 128, 256, 512], help="hidden sizes")
    parser.add_argument(
        "--depths",
        type=positive,
        nargs="*",
        help="numbers of layers; by default 2 4 8 16, with mup none: it has no depth rule",
    )
    parser.add_argument("--head-sizes", type=positive, nargs="*", default=[], help="sizes of a head, by default none")
    parser.add_argument("--steps", type=positive, default=5, help="training steps before the comparison")
    parser.add_argument(
        "--readout-steps", type=positive, default=30, help="the same for the logits, which settle later"
    )
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--bound", type=float, default=0.25, help="largest power of the size that passes")
    parser.add_argument(
        "--output",
        type=path_argument,
        default=ANALYSIS.parent / "outputs" / "coordinate_check.png",
        help="figure",
    )
    parser.add_argument("--records", type=record_argument, help="file of records, one per line, to add this check to")
    own, overrides = parser.parse_known_args()
    sys.argv = [str(ANALYSIS.parent / "src" / "train.py"), *overrides]  # whose keys a refusal names
    try:
        config = read_config(overrides)
        if own.depths is None:
            own.depths = [] if config.model.parametrization == "mup" else [2, 4, 8, 16]
        prepare_figure("--output", own.output)
        if not 0 < own.bound < math.inf:
            raise ValueError(f"`--bound` must be above 0, but is {own.bound:g}")
        axes = {"width": own.widths, "depth": own.depths, "head size": own.head_sizes}
        for name, sizes in axes.items():
            if len(set(sizes)) == 1:
                option = f"--{name.replace(' ', '-')}s"
                raise ValueError(f"`{option}` must have at least two sizes or none, but has {sizes[0]}")
        if not any(axes.values()):
            raise ValueError("`--widths`, `--depths` or `--head-sizes` must have sizes, but all have none")
        for width in own.widths:
            resized(config, width, config.model.num_layers, config.model.head_size)
        for head_size in own.head_sizes:
            resized(config, config.model.hidden_size, config.model.num_layers, head_size)
        name = f"{config.model.name}_{config.model.parametrization}"
        if own.records and name in read_lines(own.records):
            raise ValueError(f"`--records` must not have the check {name} yet, but {own.records} does")
        rows = check(config, axes, own.seeds, own.steps, own.readout_steps)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        exit_with(error)
    failed = [row for row in rows if not abs(row["power"]) <= own.bound]  # nan fails too
    for row in rows:
        values = "  ".join(f"{value:9.4f}" for value in row["moves"])
        verdict = "FAIL" if row in failed else "pass"
        print(f"{row['axis']:10}{row['part']:16}{values}   power {row['power']:+.2f}  {verdict}")
    found = f"{len(failed)} of {len(rows)} parts change with the size" if failed else "all parts move equally far"
    title = f"{config.model.name}, {config.model.parametrization}, lr {config.optimizer.lr:g}: {found}"
    draw_moves(rows, own.bound, title).savefig(own.output)
    if own.records:
        settings = {name: getattr(own, name) for name in ("steps", "readout_steps", "seeds", "bound")}
        settings |= {"model": config.model.to_dict(), "optimizer": dataclasses.asdict(config.optimizer), "rows": rows}
        powers = {f"{row['axis']}/{row['part']}": row["power"] for row in rows}
        metrics = {part: {"value": power, "unit": "power of the size"} for part, power in powers.items()}
        add_line(own.records, name, new_record("coordinate_check", "run", settings, None, metrics, device="cpu"))
    print(f"{title}\nfigure: {own.output}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
