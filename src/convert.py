"""Convert checkpoints: other layouts, other padding, Hugging Face both ways; every key: conf/convert.yaml."""

import lmscale.cli.ctrl_c  # noqa: F401

# isort: split
from pathlib import Path

from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.cli.next_command import load_published, use_model
from lmscale.config.convert import ConvertConfig


def convert(values: dict) -> None:
    """Build the config, convert, and print what was written."""
    config = ConvertConfig.from_dict(values)
    try:
        written = write(config)
    except OSError as error:  # the disk is full, a folder is not writable
        raise ValueError(f"the conversion was not finished and nothing was kept: {error}") from error
    from lmscale.checkpoint import Checkpoint
    from lmscale.hugging_face.config import read_hf_config

    print(f"wrote {written}")
    if config.format == "hugging_face":
        print(f"load: {load_published(written, read_hf_config(written / 'config.json')['architectures'][0])}")
    elif "finetune" not in (checkpoint := Checkpoint.open(written)).metadata.state:
        model, drawn = checkpoint.model_config(), checkpoint.metadata.run.get("initialized", ())
        print(f"use: {use_model(written, model.family, model.max_position_embeddings, drawn=drawn)}")


def write(config: ConvertConfig) -> Path:
    """Write the source, which is ours or Hugging Face's, in the requested form.

    Returns:
        our checkpoint, or the folder of the Hugging Face model.

    Raises:
        ValueError: anything that makes the conversion impossible or would change the model.
    """
    import torch  # takes seconds: only after the cheap checks

    from lmscale.checkpoint import METADATA, find_given
    from lmscale.checkpoint.reshard import reshard
    from lmscale.finetune.publishing import read_head, read_published_head
    from lmscale.hugging_face.conversion import export_hugging_face, import_hugging_face

    source, target, tokenizer = config.source, config.target, config.tokenizer_path
    found = find_given("source", source)
    is_published = not (found / METADATA).is_file()
    if is_published and config.format == "hugging_face":
        raise ValueError(f"`source` must be a checkpoint of ours with format=hugging_face, but is {source}")
    if config.initialize_missing_heads and not is_published:
        raise ValueError("`initialize_missing_heads` must be false for a checkpoint of ours, but is true")
    layout = config.tp_size, config.vocab_multiple, tokenizer
    if is_published:
        drawn = config.initialize_missing_heads, config.seed
        return import_hugging_face(source, target, *layout, *drawn, read_published_head(found))
    if config.format == "hugging_face":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.dtype]
        sizes = dtype, round(config.max_file_gb * 1e9)
        return export_hugging_face(source, target, *sizes, tokenizer, read_head(found))
    return reshard(source, target, *layout)


if __name__ == "__main__":
    run_hydra_main(lambda cfg: run_task(convert, cfg))
