"""Sizes of the study's models: parameters by part and rank, predicted and tracked memory per rank, and messages."""

import dataclasses
from functools import cache

import pandas as pd

from analysis.ledger.entries import paper_shape
from lmscale.config import Layout, TransformerConfig
from lmscale.paper import BERT_SEQ_LENGTH, BERT_SIZES, BERT_VOCABULARY, SEQ_LENGTH
from lmscale.planner.communication import micro_batch_collectives
from lmscale.planner.memory import estimate_memory
from lmscale.planner.params import count_parameters
from lmscale.planner.workload import Workload

from .study import MICRO_BATCH, SIZES, STUDY_TP_SIZES, study_model

TP_SIZES = (1, 2, 4, 8)
DEVICES = {"V100": 30.0, "A100": 77.2, "H200": 137.8}  # GiB for tensors: memory less reserve, as in conf/cluster/
_EMBEDDINGS = ("word embedding", "position embedding", "token-type embedding")
_GIB = 2**30
BERT_MICRO_BATCH = 4  # sequences


@cache
def paper_models() -> dict[str, TransformerConfig]:
    """Every model of the paper by its name in `conf/model/`: GPTs first, in ascending size."""
    gpts = {f"gpt_{name.lower()}": size for name, size in SIZES.items()}
    berts = {"bert_336m": BERT_SIZES["336M"], "bert_752m": paper_shape("figure_7/bert_752m")}
    berts |= {f"bert_{name.lower()}": BERT_SIZES[name] for name in ("1.3B", "3.9B")}
    return {name: study_model(*size) for name, size in gpts.items()} | {
        name: TransformerConfig("bert", *size, BERT_VOCABULARY, BERT_SEQ_LENGTH, recompute="full", attention="exact")
        for name, size in berts.items()
    }


def parameter_table() -> pd.DataFrame:
    """One row per model: millions of parameters in total, by part, per rank at tp 4, and replicated on every rank."""
    rows = []
    for name, config in paper_models().items():
        count = count_parameters(config, Layout(tp_size=4))
        embeddings = sum(count.parts.get(part, 0) for part in _EMBEDDINGS)
        layers = count.parts["attention"] + count.parts["mlp"]
        other = count.total - embeddings - layers
        millions = {"total": count.total, "embeddings": embeddings, "layers": layers, "other": other}
        millions |= {"per rank at tp 4": count.per_rank, "of these replicated": count.replicated}
        rows.append({"model": name} | {part: number / 1e6 for part, number in millions.items()})
    return pd.DataFrame(rows).assign(unit="million parameters", evidence="exact")


def memory_table() -> pd.DataFrame:
    """One row per model, tensor-parallel size and recomputation: GiB per rank under the paper's recipe.

    fp16, one micro-batch of 8 (GPT) or 4 (BERT) sequences on one data rank, with exact attention as in the paper.
    """
    rows = []
    for name, config in paper_models().items():
        seq_length = config.max_position_embeddings
        batch = MICRO_BATCH if seq_length == SEQ_LENGTH else BERT_MICRO_BATCH
        for recompute in ("none", "full"):
            job = Workload(config, batch, batch, seq_length, "fp16").change(recompute=recompute)
            sizes = [size for size in TP_SIZES if config.num_attention_heads % size == 0]
            found = {f"tp {n}": estimate_memory(job, Layout(tp_size=n)).total / _GIB for n in sizes}
            rows.append({"model": name, "recompute": recompute} | found)
    return pd.DataFrame(rows).assign(unit="GiB per rank", evidence="predicted")


def peak_memory(record: dict) -> pd.DataFrame:
    """Predicted and tracked peak of every case in a record of `analysis/correctness/peak_memory.py`.

    Returns:
        rows with columns `configuration`, `predicted`, `tracked`, `unit`, `difference %` (relative to tracked),
        `evidence`.
    """
    rows = pd.DataFrame(record["config"]["rows"])
    predicted, tracked = rows["predicted"] / 2**20, rows["tracked"] / 2**20
    sizes = {"configuration": rows["name"], "predicted": predicted, "tracked": tracked, "unit": "MiB"}
    return pd.DataFrame(sizes | {"difference %": 100 * (predicted / tracked - 1), "evidence": rows["evidence"]})


def communication_table() -> pd.DataFrame:
    """One row per model of Table 1: all-reduces and GiB sent per rank for one micro-batch of 8 sequences in fp16.

    With and without recomputation, and the GiB of logits that the vocabulary-parallel loss avoids sending.
    """
    rows = []
    for name, tp_size in STUDY_TP_SIZES.items():
        row: dict[str, object] = {"model": f"gpt_{name.lower()}", "tensor ranks": tp_size}
        for recompute in ("none", "full"):
            config = dataclasses.replace(study_model(*SIZES[name]), recompute=recompute)
            job = Workload(config, MICRO_BATCH, MICRO_BATCH, SEQ_LENGTH, "fp16", on_gpu=False)
            sent = micro_batch_collectives(job, Layout(tp_size=tp_size))
            row[f"all-reduces, recompute {recompute}"] = sum(collective.count for collective in sent)
            row[f"GiB, recompute {recompute}"] = sum(collective.total_bytes for collective in sent) / _GIB
        logits = MICRO_BATCH * SEQ_LENGTH * config.padded_vocab_size * 2  # bytes that gathering the output would send
        row["GiB of logits, never sent"] = logits / _GIB if tp_size > 1 else 0.0
        rows.append(row)
    return pd.DataFrame(rows).assign(evidence="exact")
