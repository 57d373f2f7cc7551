"""The numbers of the paper's text as entries of the ledger, section by section."""

import dataclasses
from collections.abc import Iterator
from functools import cache

from ..config import ParallelConfig, Recompute
from ..planner.communication import Collective, micro_batch_collectives
from ..planner.flops import TERA
from . import commands
from . import ledger as paper
from .evidence import (
    SETTING,
    Entry,
    Finder,
    Found,
    anchored,
    asked,
    combined,
    counted,
    modelled,
    not_run,
    own_metric,
    recorded,
    setting,
)
from .scaling import BASELINE_FLOPS_PER_S, ITERATIONS_AN_EPOCH, MICRO_BATCH, predict_petaflops, study_model

_GPT, _BERT, _CLUSTER = "recipe/base/paper_gpt.yaml", "recipe/base/paper_bert.yaml", "cluster/dgx2h_v100.yaml"
_NO_CORPUS = "the corpus was not prepared: its sources could not be reached"
_NO_WIKITEXT = "WikiText-103's training part could not be reached"
_GPUS = 512  # of the largest runs


def text_entries() -> Iterator[Entry]:
    """Sections 3 to 5, the appendices and the blog."""
    for part in (_communication, _corpus, _training, _machine, _scaling, _models, _evaluation):
        yield from part()


# What comes with the code's name; its bytes are of fp32.
_OF_THE_LOSS = ": the rows' maxima, sums and scores of the target, of which the paper's formula needs the last two"


def _communication() -> Iterator[Entry]:
    """Section 3: what the tensor ranks of the 2.5 B model send in one micro-batch."""
    size, sequences = paper.STUDY_MODELS["2.5B"].size, MICRO_BATCH
    command = commands.study("2.5B", size[2], 2, 1)
    num_numbers = sequences * paper.SEQ_LENGTH

    @cache
    def sent() -> tuple[Collective, ...]:
        # Full recomputation would repeat the forward pass's.
        config = dataclasses.replace(study_model(*size), recompute=Recompute.NONE)
        return micro_batch_collectives(config, ParallelConfig(2, 1), sequences, paper.SEQ_LENGTH, "fp16")

    def of(what: str, attribute: str, over: int, note: str = "") -> Finder:
        def count() -> float:
            return sum(getattr(each, attribute) for each in sent() if each.what == what) / over

        return counted("lmscale.planner.communication", count, note)

    layers, hidden, outputs = size[0], size[1], "attention and MLP outputs"
    inputs = "gradients of attention and MLP inputs"
    rows = (
        ("layer/forward", 2, "all-reduces a layer", of(outputs, "count", layers)),
        ("layer/backward", 2, "all-reduces a layer", of(inputs, "count", layers)),
        ("layer/elements", 1, "x b s h, each", of(outputs, "num_bytes", 2 * num_numbers * hidden)),  # of 2 bytes
        ("embedding", 1, "all-reduces", of("embedding", "count", 1)),
        ("loss/numbers", 1, "x b s", of("loss", "total_bytes", 4 * num_numbers, _OF_THE_LOSS)),
    )
    yield from (Entry(f"section_3/{name}", *rest, command) for name, *rest in rows)


def _corpus() -> Iterator[Entry]:
    """Section 4.1, and 5.2 and 5.3 for what was held out and leaked."""
    prepare = commands.PREPARE
    instead = {
        "section_5.2/overlap/lambada": commands.PREPARE_LAMBADA,
        "section_5.2/overlap/wikitext103_own_train": commands.PREPARE_WIKITEXT,
        "section_5.3/held_out": commands.PREPARE_BERT,
    }
    rows = (
        ("section_4.1/min_tokens", 128, "tokens a document", setting("prepare_data/cleaning/paper.yaml", "min_tokens")),
        ("section_4.1/jaccard", 0.7, "Jaccard similarity", setting("prepare_data/dedup/paper.yaml", "jaccard")),
        ("section_4.1/size", 174, "GB", not_run(_NO_CORPUS)),
        ("section_5.2/ngram", 8, "words", setting("prepare_data.yaml", "overlap/ngram")),
        ("section_5.2/overlap/wikitext103_test", 10.8, "% of 8-grams, at most", not_run(_NO_CORPUS)),
        ("section_5.2/overlap/lambada", 1.4, "% of 8-grams, at most", not_run(_NO_CORPUS)),
        ("section_5.2/overlap/wikitext103_own_train", 9.09, "% of 8-grams", not_run(_NO_WIKITEXT)),
        ("section_5.3/held_out", 3, "% held out", setting("prepare_data.yaml", "validation_every", lambda n: 100 / n)),
    )
    yield from (_own(*row, instead.get(row[0], prepare)) for row in rows)
    documents = own_metric("section_4.1/documents", not_run(_NO_CORPUS))
    yield Entry("section_4.1/documents", 40, "million documents", documents, prepare, f"{paper.INFERRED}, about")
    split = setting("prepare_data.yaml", "validation_every", lambda n: n - 1)
    yield Entry("section_4.1/split", 29, "training documents to 1", split, prepare, paper.BLOG)


def _training() -> Iterator[Entry]:
    """Section 4.2: for all, of GPT, of BERT."""
    gpt, bert = commands.train_gpt("8.3B"), commands.train_bert("1.3B", 256)
    model, adam = "model/base/gpt.yaml", "optimizer/adamw.yaml"
    for_gpt = (
        ("dropout", 0.1, "probability", setting(model, "hidden_dropout")),
        ("init_std", 0.02, "standard deviation", setting(model, "initializer_std")),
        ("weight_decay", 0.01, "x learning rate", setting(adam, "weight_decay")),
        ("residual_init", "std / sqrt(2 layers)", "", setting(model, "scale_residual_init", _scaled)),
        ("clip", 1.0, "gradient norm", setting(adam, "max_grad_norm")),
        ("gpt/seq_length", paper.SEQ_LENGTH, "tokens", setting(model, "max_position_embeddings")),
        ("gpt/batch", 512, "sequences", setting(_GPT, "global_batch_size")),
        ("gpt/steps", paper.PAPER_STEPS, "iterations", setting(_GPT, "trainer/max_steps")),
        ("gpt/lr", 1.5e-4, "learning rate", setting(_GPT, "optimizer/lr")),
        ("gpt/warmup", 3_000, "iterations", setting(_GPT, "schedule/warmup_steps")),
        ("gpt/decay", 297_000, "iterations", combined(_GPT, "trainer/max_steps", "-", "schedule/warmup_steps")),
        ("gpt/min_lr", 1e-5, "learning rate", setting(_GPT, "schedule/min_lr")),
    )
    for_bert = (
        ("bert/vocabulary", paper.BERT_VOCABULARY, "ids", setting("model/base/bert.yaml", "vocab_size")),
        ("bert/batch", 1024, "sequences", setting(_BERT, "global_batch_size")),
        ("bert/lr", 1e-4, "learning rate", setting(_BERT, "optimizer/lr")),
        ("bert/warmup", 10_000, "iterations", setting(_BERT, "schedule/warmup_steps")),
        ("bert/decay", 2_000_000, "iterations", setting("recipe/bert_3.9b.yaml", "schedule/decay_steps")),
    )
    for command, rows in ((gpt, for_gpt), (bert, for_bert)):
        yield from (Entry(f"section_4.2/{name}", *rest, command) for name, *rest in rows)


def _machine() -> Iterator[Entry]:
    """Section 5: what it ran on."""
    plan = "python src/plan.py model=gpt_8.3b parallel.tp_size=8 parallel.dp_size=64 cluster=dgx2h_v100"
    rows = (
        ("gpus", _GPUS, "V100", setting(_CLUSTER, "num_devices")),
        ("servers", 32, "DGX-2H", combined(_CLUSTER, "num_devices", "/", "devices_per_node")),
        ("gpu_memory", 32, "GB", setting(_CLUSTER, "memory_gib")),
    )
    yield from (Entry(f"section_5/{name}", *rest, plan) for name, *rest in rows)
    tensor = modelled("effective, fitted", lambda cluster: cluster.calibration.tensor_bandwidth_gb_s)
    data = modelled("effective, fitted", lambda cluster: cluster.calibration.data_bandwidth_gb_s)
    yield Entry("section_5/bandwidth_in_server", 300, "GB/s", tensor, commands.COST_MODEL)
    yield Entry("section_5/bandwidth_between_servers", 100, "GB/s", data, commands.COST_MODEL)


def _scaling() -> Iterator[Entry]:
    """Section 5.1 beyond Figures 1 and 5."""
    one, all_gpus = commands.study("1.2B", 16, 1, 1), commands.study("8.3B", 32, 8, paper.DATA_RANKS)
    config, model = study_model(*paper.STUDY_MODELS["8.3B"].size), "model/base/gpt.yaml"
    share = anchored("39 TFLOP/s over the cluster's peak", lambda c: 100 * BASELINE_FLOPS_PER_S / (c.peaks.fp16 * TERA))
    of_linear = modelled(
        "PFLOP/s on 512 GPUs over 512 x 39 TFLOP/s",
        lambda cluster: 100 * predict_petaflops(cluster) * 1e15 / (_GPUS * BASELINE_FLOPS_PER_S),
    )
    rate = anchored("the anchor of the cost model's clock", lambda _: BASELINE_FLOPS_PER_S / TERA)
    rows = (
        ("mp_batch", MICRO_BATCH, "sequences", asked(one, "global_batch_size"), one),
        ("mp_dp_batch", 512, "sequences", asked(all_gpus, "global_batch_size"), all_gpus),
        ("data_ranks", paper.DATA_RANKS, "data ranks", asked(all_gpus, "parallel.dp_size"), all_gpus),
        ("baseline", BASELINE_FLOPS_PER_S / TERA, "TFLOP/s on one GPU", rate, one),
        ("baseline_share", 30, "% of the peak", share, one),
        ("efficiency_512", 76, "% of 512 x 39 TFLOP/s", of_linear, all_gpus),
        ("vocabulary", paper.GPT_VOCABULARY, "ids", setting(model, "vocab_size"), one),
        ("vocabulary_multiple", 1024, "rows", setting(model, "vocab_multiple"), one),
        ("vocabulary_a_gpu", 128, "rows, a multiple of", setting(model, "vocab_multiple", lambda n: n / 8), one),
        ("padded_vocabulary", 51_200, "rows", counted("lmscale.config", lambda: config.padded_vocab_size), one),
    )
    yield from (Entry(f"section_5.1/{name}", *rest) for name, *rest in rows)


def _models() -> Iterator[Entry]:
    """Sections 5.2 and 5.3 beyond the tables."""
    epoch = not_run(_NO_CORPUS)
    yield Entry("section_5.2/epoch", ITERATIONS_AN_EPOCH, "iterations", epoch, commands.train_gpt("8.3B"))
    for size in ("336M", "1.3B", "3.9B"):
        row, place = paper.BERT_MODELS[size], f"section_5.3/bert_{size.lower()}"
        command = commands.train_bert(size, row.num_gpus)
        file = "recipe/bert_3.9b.yaml" if size == "3.9B" else _BERT
        yield Entry(f"{place}/steps", row.steps, "iterations", setting(file, "trainer/max_steps"), command)
        why = f"needs the corpus and {row.num_gpus} GPUs; not trained"
        loss = not_run(f"{why}. Called perplexity, almost surely nats")
        yield _own(f"{place}/validation", row.validation, "perplexity", loss, command)
    seeds = setting("finetune/sweep/five_seeds.yaml", "hydra/sweeper/params/seed", lambda text: len(text.split(",")))
    yield Entry("section_5.3/seeds", paper.NUM_SEEDS, "seeds, their median", seeds, commands.finetune("mnli", "336M"))


def _evaluation() -> Iterator[Entry]:
    """Appendices C and E, and where the blog differs."""
    five = commands.ensemble("race", "3.9B")
    members = Found(SETTING, "the command: its run folders", five.count("multirun/"))
    yield Entry("section_5.3/ensemble", 5, "members", lambda _: members, five)
    zero_shot = commands.zero_shot("wikitext103", "8.3B")
    count = commands.COUNT_WIKITEXT
    small = "zero_shot_small_wikitext103.json".__eq__
    words = recorded(small, ("wikitext103/T_o",), "the validation file", "")
    targets = recorded(small, ("wikitext103/T",), "the validation file, a tokenizer of 8,192 ids", "")
    file = "zero_shot/task/wikitext103.yaml"
    yield Entry("appendix_e/T_o", paper.WIKITEXT_TEST_WORDS, "words", words, count)
    yield Entry("appendix_e/T", paper.WIKITEXT_TEST_TARGETS, "tokens", targets, count)
    yield Entry("appendix_e/window", paper.SEQ_LENGTH, "tokens", setting(file, "window"), zero_shot)
    yield Entry("appendix_e/overlap", 32, "tokens", setting(file, "stride"), zero_shot)
    samples = recorded("appendix_c.json".__eq__, ("validation_perplexity",), "a small GPT, five prompts", "")
    yield Entry("appendix_c/samples", "five prompts continued", "text", samples, commands.GENERATE)
    row, perplexity, lambada = paper.GPT_MODELS["2.5B"], "WikiText103 perplexity", "LAMBADA accuracy, %"
    no_gpt = f"needs the corpus and {row.num_gpus} GPUs; not trained. Table 3 prints {{}}"
    overlap, no_corpus = "% of 8-grams", f"{_NO_CORPUS}. Section 5.2 prints another value"
    no_wikitext = f"{_NO_WIKITEXT}. Section 5.2 prints another value"
    of_blog = (
        (
            "gpt_2.5b/wikitext103",
            12.68,
            perplexity,
            no_gpt.format(row.wikitext103),
            commands.zero_shot("wikitext103", "2.5B"),
        ),
        ("gpt_2.5b/lambada", 61.52, lambada, no_gpt.format(row.lambada), commands.zero_shot("lambada", "2.5B")),
        ("previous_best/wikitext103", 16.43, perplexity, "a result of others that the blog quotes", ""),
        ("overlap/wikitext103_test", 10, overlap, no_corpus, commands.PREPARE),
        ("overlap/wikitext103_own_train", 9, overlap, no_wikitext, commands.PREPARE_WIKITEXT),
    )
    for name, value, unit, why, command in of_blog:
        found = own_metric(f"blog/{name}", not_run(why))
        yield Entry(f"blog/{name}", value, unit, found, command, paper.BLOG)


def _scaled(value: bool) -> str:
    return "std / sqrt(2 layers)" if value else "std"


def _own(entry_id: str, value: float, unit: str, otherwise: Finder, command: str) -> Entry:
    """An entry that a later record may fill."""
    return Entry(entry_id, value, unit, own_metric(entry_id, otherwise), command)
