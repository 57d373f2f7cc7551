"""The model card of an export, and its upload, against a local stand-in for the hub."""

import huggingface_hub
import pytest
import yaml

from lmscale.checkpoint.metadata import CheckpointMetadata
from lmscale.checkpoint.model_card import check_hub, model_card, push_to_hub
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


class Hub:
    """What `HfApi` is asked."""

    calls: list[tuple] = []
    problem: str | None = None

    def whoami(self) -> dict:
        if self.problem:
            raise ConnectionError(self.problem)
        return {"name": "me"}

    def create_repo(self, repo_id: str, exist_ok: bool) -> None:
        self.calls.append(("create", repo_id, exist_ok))

    def upload_folder(self, repo_id: str, folder_path: object) -> str:
        if self.problem:
            raise ConnectionError(self.problem)
        self.calls.append(("upload", repo_id, str(folder_path)))
        return f"https://hub/{repo_id}/commit/1"


@pytest.fixture
def hub(monkeypatch) -> type[Hub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    return Hub


def test_a_push_makes_the_repository_and_uploads_the_folder(hub, tmp_path) -> None:
    check_hub("me/gpt")
    assert push_to_hub(tmp_path, "me/gpt") == "https://hub/me/gpt/commit/1"
    assert hub.calls == [("create", "me/gpt", True), ("upload", "me/gpt", str(tmp_path))]


def test_without_network_package_or_upload_one_line_says_so(hub, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(hub, "problem", "no route\nto host")
    with pytest.raises(ValueError, match=r"`push_to_hub` must be null without a network .* me/gpt: no route to host$"):
        check_hub("me/gpt")
    with pytest.raises(
        ValueError, match=rf"the model is in {tmp_path}, but .* `hf upload me/gpt {tmp_path}` tries again"
    ):
        push_to_hub(tmp_path, "me/gpt")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="must be null where huggingface_hub is not installed, but is me/gpt"):
        check_hub("me/gpt")
