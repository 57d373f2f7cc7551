"""The model card of an export."""

import yaml

from lmscale.checkpoint.metadata import CheckpointMetadata
from lmscale.checkpoint.model_card import model_card
from lmscale.config import TransformerConfig

GPT = TransformerConfig("gpt", 3, 24, 2, 1999, 32)
RUN = {
    "name": "gpt_mine",
    "data": {"kind": "local", "path": "/home/somebody/books.txt", "seq_length": 32},
    "global_batch_size": 1024,
    "trainer": {"max_steps": 3000},
    "optimizer": {"lr": 1.5e-4},
    "precision": {"dtype": "bf16"},
    "seed": 7,
}


def metadata(**changes: object) -> CheckpointMetadata:
    values = {"step": 2000, "layout": {}, "model": {}, "tensors": {}, "files": {}, "optimizer": {}, "run": RUN}
    return CheckpointMetadata(**values | {"state": {"validation": {"val/loss": 3.21987}}} | changes)


def rows(card: str) -> dict[str, str]:
    lines = [line for line in card.splitlines() if line.startswith("| ") and line != "| | |"]
    return dict(line.strip("| ").split(" | ", 1) for line in lines)


def test_the_card_has_sizes_data_steps_losses_and_how_to_load() -> None:
    card = model_card(metadata(), GPT, "GPT2LMHeadModel", "float32", "me/gpt_mine")
    found = rows(card)
    assert found["layers"] == "3" and found["hidden size"] == "24" and found["vocabulary"] == "1,999"
    assert found["data"] == "local, books.txt" and "/home" not in card
    assert found["steps"] == "2,000 of 3,000" and found["batch"] == "1,024 sequences of 32 tokens"
    assert found["val/loss"] == "3.2199" and found["learning rate"] == "0.00015" and found["seed"] == "7"
    assert 'model = GPT2LMHeadModel.from_pretrained("me/gpt_mine")' in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert "\n# license: choose one" in card


def test_an_imported_model_s_card_says_where_it_is_from() -> None:
    bert = TransformerConfig("bert", 3, 24, 2, 1999, 32)
    imported = metadata(run={"converted_from": "/models/minilm"}, state={}, step=0)
    card = model_card(imported, bert, "BertForPreTraining", "float16", "published")
    assert rows(card)["imported from"] == "minilm"
    assert "pipeline_tag: fill-mask" in card and "## Validation" not in card and "# published\n" in card
