"""Convert checkpoints: other layouts, other padding, Hugging Face both ways; see conf/convert.yaml for every key."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.config.convert import ConvertConfig


def convert(values: dict) -> None:
    """Check the keys, convert, and say what was written."""
    config = ConvertConfig.from_dict(values)
    try:
        print(f"wrote {write(config)}")
    except OSError as error:  # a disk that fills up, a folder without permission
        raise ValueError(f"the conversion was not finished and nothing was kept: {error}") from error


def write(config: ConvertConfig) -> Path:
    """Find out what the source is, and write it in the form that was asked for.

    Returns:
        the checkpoint of ours, or the folder of the Hugging Face model.

    Raises:
        ValueError: anything that makes the conversion impossible, or its result differ.
    """
    import torch  # takes seconds: only after the cheap checks

    from lmscale.checkpoint import METADATA
    from lmscale.checkpoint.hugging_face import export_hugging_face, import_hugging_face
    from lmscale.checkpoint.reshard import find_checkpoint, reshard

    # A run folder has a config.json of its own.
    is_ours = (find_checkpoint(config.source) / METADATA).is_file()
    is_published = not is_ours and (Path(config.source) / "config.json").is_file()
    if is_published and config.format == "hugging_face":
        raise ValueError(f"`source` must be a checkpoint of ours with format=hugging_face, but is {config.source}")
    if config.initialize_missing_heads and not is_published:
        raise ValueError("`initialize_missing_heads` must be false for a checkpoint of ours, but is true")
    if is_published:
        return import_hugging_face(
            config.source,
            config.target,
            config.tp_size,
            config.vocab_multiple,
            config.tokenizer_path,
            config.initialize_missing_heads,
            config.seed,
        )
    if config.format == "hugging_face":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.dtype]
        max_file_bytes = round(config.max_file_gb * 1e9)
        return export_hugging_face(config.source, config.target, dtype, max_file_bytes, config.tokenizer_path)
    return reshard(config.source, config.target, config.tp_size, config.vocab_multiple, config.tokenizer_path)


@hydra.main(version_base="1.3", config_path="../conf", config_name="convert")
def main(cfg: DictConfig) -> None:
    """Entry of Hydra, once for each job of a sweep."""
    run_task(convert, cfg)


if __name__ == "__main__":
    run_hydra_main(main)
