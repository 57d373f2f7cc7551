"""Finetuned models as folders of Hugging Face: made by transformers, taken back, and scored again."""

from pathlib import Path

import torch
import transformers

from lmscale.checkpoint import Checkpoint, latest_checkpoint
from lmscale.checkpoint.tokenizer_files import TokenizerFiles
from lmscale.config import TransformerConfig
from lmscale.config.finetune import FinetuneConfig
from lmscale.finetune.publishing import read_head, read_published_head
from lmscale.hugging_face.config import config_to_hf
from lmscale.hugging_face.conversion import export_hugging_face, import_hugging_face

SAVED = {"trainer__save": True, "precision__dtype": "fp32"}
OWN = {"id": "id", "first": "question1", "second": None, "label": "is_duplicate"}
PREFIX = {"pre": "MegatronBert", "post": "Bert"}


def publish(run: FinetuneConfig, name: str = "published", **settings) -> Path:
    path = latest_checkpoint(run.run_dir)
    return export_hugging_face(path, Path(run.run_dir) / name, head=read_head(path), **settings)


def score_again(run: FinetuneConfig, ckpt: Path, folder: Path, **changes) -> FinetuneConfig:
    """The run with another checkpoint, scored as it is."""
    values = run.to_dict() | {"ckpt": str(ckpt), "run_dir": str(folder / "scored")} | changes
    values["trainer"] |= {"num_epochs": 0}
    values["parallel"] |= {"tp_size": 1}
    return FinetuneConfig.from_dict(values)


def take_back(folder: Path, target: Path, tp_size: int = 1) -> Path:
    import_hugging_face(folder, target, tp_size, head=read_published_head(folder))
    return target


def save_classifier(folder: Path, ckpt: Path, order: str, **settings) -> tuple:
    """A random classifier with the sizes and the tokenizer of a checkpoint, saved by transformers."""
    config = TransformerConfig.from_dict(Checkpoint.open(latest_checkpoint(ckpt)).metadata.model)
    torch.manual_seed(3)
    published = config_to_hf(config, "float32", {"pad_token_id": 0}, **settings)
    model = getattr(transformers, f"{PREFIX[order]}ForSequenceClassification")(published).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3)
    model.save_pretrained(folder)
    TokenizerFiles(ckpt / "tokenizer", config).copy_to(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)
