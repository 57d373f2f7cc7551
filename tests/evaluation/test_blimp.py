"""BLiMP: equal to plain transformers code and at every layout; a tie is wrong; files of another form raise."""

import gzip
import hashlib
import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
import transformers
from crafted import save_gpt, zero_model
from ranks import make_context, run_ranks
from sharding import random_model, small_config

from lmscale.config import TransformerConfig
from lmscale.config.data import TokenizerConfig
from lmscale.config.zero_shot import TaskConfig, ZeroShotConfig
from lmscale.data.tokenizer import Tokenizer, load_published_tokenizer, train_tokenizer
from lmscale.evaluation import blimp
from lmscale.evaluation.blimp import Answer, Blimp, word_ends
from lmscale.evaluation.loading import check_model
from lmscale.evaluation.zero_shot_job import evaluate, prepare
from lmscale.hugging_face.conversion import export_hugging_face, import_hugging_face
from lmscale.paper import GPT_SIZES, STEPS
from lmscale.parallel import ParallelContext
from lmscale.trained_model import load_model

PLAIN = ParallelContext()
TEXTS = ["the cats sleep, don't they?", "a dog runs with the cats", "who has seen a dog that sleeps"]
PAIRS = {  # of sentences by UID; with short and long words, and many lengths
    "agreement": [("The cats sleep.", "The cats sleeps."), ("A dog runs", "A dog run"), ("Don't they run?", "They?")],
    "islands": [("Who has seen a dog", "Who a dog has seen"), ("catsdogs sleep", "sleepcatsdogs"), ("a dog", "a cat")],
    "binding_1": [("The dog that sleeps runs with a cat", "The dog that sleep runs with a cat")],
}
TERMS = {"agreement": "subject_verb_agreement", "islands": "s-selection", "binding_1": "argument_structure"}
FAMILIES = [("gpt", "pre"), ("bert", "post"), ("bert", "pre")]
THEIRS = {
    ("gpt", "pre"): transformers.GPT2LMHeadModel,
    ("bert", "post"): transformers.BertForMaskedLM,
    ("bert", "pre"): transformers.MegatronBertForMaskedLM,
}


def row(uid: str, number: int, good: str, bad: str) -> dict[str, str]:
    names = {"field": "syntax", "linguistics_term": TERMS.get(uid, "ellipsis"), "UID": uid, "pairID": str(number)}
    return {"sentence_good": good, "sentence_bad": bad, **names, "simple_LM_method": True}


def write_file(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(exist_ok=True)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def write_pairs(folder: Path, pairs: dict[str, list[tuple[str, str]]] = PAIRS) -> Path:
    for number, (uid, own) in enumerate(pairs.items()):
        rows = [row(uid, 2 * index, *pair) for index, pair in enumerate(own)]
        write_file(folder / f"{uid}.jsonl{'.gz' if number % 2 else ''}", *rows)
    return folder


def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer(train_tokenizer(TEXTS * 5, family, 270 if family == "gpt" else 48, "size"))


def task_of(folder: Path, family: str, **changes) -> Blimp:
    """The task as a small model of this family reads it."""
    tokenizer = tokenizer_of(family)
    config = config_of(family, **changes)
    return Blimp.read(TaskConfig("blimp", str(folder)), tokenizer).for_model(config)


def config_of(family: str, norm_order: str = "pre", max_position_embeddings: int = 40, **changes):
    vocab_size = tokenizer_of(family).vocab_size
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings}
    return small_config(family, norm_order=norm_order, **sizes, **changes)


def saved_model(config) -> torch.nn.Module:
    """A random model as a checkpoint holds it, in fp32, whose padded rows are zero."""
    model = random_model(config, PLAIN).eval()
    with torch.no_grad():
        model.transformer.word_embedding.weight[config.vocab_size :] = 0.0
        for param in model.parameters():
            param.copy_(param.float())
    return model


@torch.inference_mode()
def plain_gpt(model, tokenizer: Tokenizer, text: str) -> dict[str, float]:
    """Score a sentence alone."""
    ids = [tokenizer.id_of("<|endoftext|>"), *tokenizer.inner.encode(text).ids]
    scores = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    return {"blimp": sum(scores[place, token].item() for place, token in enumerate(ids[1:]))}


@torch.inference_mode()
def plain_bert(model, tokenizer: Tokenizer, text: str) -> dict[str, float]:
    """Score a sentence one masked row at a time; the words are those of the tokenizers library."""
    found = tokenizer.inner.encode(text, add_special_tokens=False)
    cls, sep, mask = map(tokenizer.id_of, ("[CLS]", "[SEP]", "[MASK]"))
    sums = {"blimp": 0.0, "blimp_word_l2r": 0.0}
    for place, token in enumerate(found.ids):
        word = found.word_ids[place]
        later = [i for i in range(place, len(found.ids)) if found.word_ids[i] == word]
        for name, masked in (("blimp", [place]), ("blimp_word_l2r", later)):
            ids = [cls, *(mask if i in masked else id for i, id in enumerate(found.ids)), sep]
            sums[name] += model(torch.tensor([ids])).logits[0, place + 1].log_softmax(dim=-1)[token].item()
    return sums


@pytest.mark.parametrize("family, norm_order", FAMILIES)
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 8192])
def test_plain_transformers_code_gives_the_same_likelihoods(tmp_path, family, norm_order, micro_batch_tokens) -> None:
    tokenizer, task = tokenizer_of(family), task_of(write_pairs(tmp_path / "pairs"), family)
    model = saved_model(config_of(family, norm_order))
    published = export_hugging_face(save_gpt(tmp_path / "ours", model, tokenizer), tmp_path / "published")
    theirs = THEIRS[family, norm_order].from_pretrained(published, dtype=torch.float64).eval()
    plain = plain_gpt if family == "gpt" else plain_bert
    answers = task.answers(task.score(model, micro_batch_tokens))
    pairs = [(uid, str(2 * index), *pair) for uid in sorted(PAIRS) for index, pair in enumerate(PAIRS[uid])]
    names = ["blimp"] if family == "gpt" else ["blimp", "blimp_word_l2r"]
    assert [(a.score, a.uid, a.pair_id) for a in answers] == [(name, *pair[:2]) for name in names for pair in pairs]
    kinds = set()
    for answer, (_, _, *sentences) in zip(answers, pairs * len(names), strict=True):
        good, bad = (plain(theirs, tokenizer, text)[answer.score] for text in sentences)
        assert (answer.good, answer.bad) == (pytest.approx(good, rel=1e-9), pytest.approx(bad, rel=1e-9))
        assert answer.right == (good > bad)
        kinds.add(answer.right)
    assert kinds == {True, False}
    if family == "bert":
        both = {(a.uid, a.pair_id): a.good for a in answers[: len(pairs)]}
        assert any(both[a.uid, a.pair_id] != pytest.approx(a.good) for a in answers[len(pairs) :])


def layout_answers(rank: int, folder: str) -> list[list[Answer]]:
    found = []
    for family in ("gpt", "bert"):
        for tp_size in (2, 1):
            model = random_model(config_of(family), make_context(tp_size, 2 // tp_size)).eval()
            task = task_of(Path(folder), family)
            found.append(task.answers(task.score(model, 40)))
    return found


def test_every_layout_gives_the_same_answers(tmp_path) -> None:
    folder = write_pairs(tmp_path / "pairs")
    by_rank = run_ranks(layout_answers, 2, str(folder))
    assert by_rank[0] == by_rank[1]
    for number, family in enumerate(("gpt", "bert")):
        task = task_of(folder, family)
        expected = task.answers(task.score(random_model(config_of(family), PLAIN).eval(), 40))
        tensor_parallel, data_parallel = by_rank[0][2 * number :][:2]
        assert data_parallel == expected  # to the bit
        for ours, theirs in zip(tensor_parallel, expected, strict=True):
            assert (ours.good, ours.bad) == (
                pytest.approx(theirs.good, rel=1e-12),
                pytest.approx(theirs.bad, rel=1e-12),
            )
            assert replace(ours, good=0, bad=0) == replace(theirs, good=0, bad=0)


def test_the_later_pieces_of_a_word_are_masked_with_its_earlier_ones(tmp_path, monkeypatch) -> None:
    continues = [False] * 5 + [False, False, True, True, False]  # by id: 7 and 8 continue a word
    assert word_ends((5, 6, 7, 8, 9), continues) == [1, 4, 4, 4, 5]
    assert word_ends((7, 8), continues) == [2, 2]  # a sentence that begins in a word
    read = []

    def note(model, tokens, rows, columns, targets):
        assert rows.tolist() == list(range(len(tokens)))
        read.extend(zip(tokens.tolist(), columns.tolist(), targets.tolist(), strict=True))
        return torch.zeros(len(tokens)), None, None

    monkeypatch.setattr(blimp, "score_places", note)
    task = task_of(write_pairs(tmp_path / "pairs", {"islands": [("a", "a")]}), "bert")
    tokenizer = tokenizer_of("bert")
    vars(tokenizer)["is_continuation"] = continues
    task = replace(task, sentences={(5, 6, 7, 8): "here"}, tokenizer=tokenizer, frame=(1, 2, 3))
    assert task.batches(100) == [list(range(6))]  # the two rows of 5 and of 8 are equal, and computed once
    task.score_batch(None, task.batches(100)[0])
    single = [
        ([1, 3, 6, 7, 8, 2], 1, 5),
        ([1, 5, 3, 7, 8, 2], 2, 6),
        ([1, 5, 6, 3, 8, 2], 3, 7),
        ([1, 5, 6, 7, 3, 2], 4, 8),
    ]
    assert sorted(read) == sorted([*single, ([1, 5, 3, 3, 3, 2], 2, 6), ([1, 5, 6, 3, 3, 2], 3, 7)])


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_rows_of_a_batch_are_equally_long_and_hold_at_most_the_tokens(tmp_path, family) -> None:
    task = task_of(write_pairs(tmp_path / "pairs"), family)
    batches = task.batches(40)
    assert sorted(index for batch in batches for index in batch) == list(range(len(task.items)))
    longest, sizes = 41, {}
    for batch in batches:
        (length,) = {task.num_read(task.items[index][0]) for index in batch}
        assert length * len(batch) <= 40 and length <= longest
        sizes.setdefault(length, []).append(len(batch))
        longest = length
    assert all(size == 40 // length for length, own in sizes.items() for size in own[:-1])
    assert family == "gpt" or max(map(len, sizes.values())) > 2
    assert [len(batch) for batch in task.batches(1)] == [1] * len(task.items)


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_ties_are_wrong_and_counted(tmp_path, family) -> None:
    pairs = {"agreement": [(" a dog", " dog a"), ("a dog", "a dog runs")], "islands": [("a dog runs", "a dog")]}
    task = task_of(write_pairs(tmp_path / "pairs", pairs), family)
    metrics = task.metrics(task.score(zero_model(config_of(family)), 8192))  # prefers only the shorter sentence
    for name in ("blimp",) if family == "gpt" else ("blimp", "blimp_word_l2r"):
        assert metrics[f"{name}/ties"] == (1, "count")
        assert (metrics[f"{name}/agreement"], metrics[f"{name}/islands"]) == ((50.0, "%"), (0.0, "%"))


def test_sentences_of_the_same_tokens_tie_exactly(tmp_path) -> None:
    pairs = {"agreement": [("The cats sleep", "the Cats sleep"), ("a dog", "a cat")]}
    task = task_of(write_pairs(tmp_path / "pairs", pairs), "bert")
    assert len(task.sentences) == 3
    metrics = task.metrics(task.score(random_model(config_of("bert"), PLAIN).eval(), 8))
    assert metrics["blimp/ties"] == metrics["blimp_word_l2r/ties"] == (1, "count")


def test_a_constant_model_scores_nothing(tmp_path) -> None:
    pairs = {"islands": [("a dog", "dog a")] * 3, "agreement": [("dog a", "a dog")]}
    for family in ("gpt", "bert"):
        task = task_of(write_pairs(tmp_path / family, pairs), family)
        metrics = task.metrics([[-3.5]] * len(task.items))
        assert metrics["blimp/accuracy"] == (0.0, "%") and metrics["blimp/ties"] == (4, "count")


def test_the_score_is_the_mean_over_paradigms(tmp_path) -> None:
    task = task_of(write_pairs(tmp_path / "pairs"), "gpt")
    right = {"agreement": [True, False, True], "islands": [True, False, False], "binding_1": [True]}
    values = {pair.good: -1.0 for pair in task.pairs}
    for pair in task.pairs:
        values[pair.bad] = -2.0 if right[pair.uid][int(pair.pair_id) // 2] else -0.5
    metrics = task.metrics([[values[tokens]] for tokens, _, _ in task.items])
    expected = {uid: 100 * fmean(own) for uid, own in right.items()}
    expected["group/subject_verb_agreement"] = expected["agreement"]
    expected["group/argument_structure"] = (expected["islands"] + 100) / 2  # published with `s-selection`
    expected["accuracy"] = (expected["agreement"] + expected["islands"] + 100) / 3
    found = {f"blimp/{key}": (pytest.approx(value), "%") for key, value in expected.items()}
    counts = {"ties": 0, "paradigms": 3, "pairs": 7, "longest": max(map(len, task.sentences))}
    assert metrics == found | {f"blimp/{key}": (value, "count") for key, value in counts.items()}


def test_the_published_pairs_have_the_known_counts(shared_data, monkeypatch) -> None:
    folder = shared_data / "blimp" / "pairs"
    tokenizer = load_published_tokenizer(TokenizerConfig("gpt2", path=str(shared_data / "gpt2-bpe")), "gpt")
    task = Blimp.read(TaskConfig("blimp", str(folder)), tokenizer)
    counts = Counter(pair.uid for pair in task.pairs)
    assert len(counts) == 67 and set(counts.values()) == {500} and task.counts["pairs"] == 33_500
    published = [json.loads(line) for line in (folder.parent / "published_scores.jsonl").read_text().splitlines()]
    groups = {row["UID"]: row["linguistics_term"] for row in published if row["UID"] != "overall"}
    assert {pair.uid: pair.group for pair in task.pairs} == groups and len(set(groups.values())) == 12
    assert (task.split, task.file_name) == ("other", "pairs")  # half of the published pairs


@pytest.mark.parametrize(
    "numbers, split", [((3, 3), "other"), ((2, 3), "complete"), ((2, 2), "other"), ((1, 3), "other")]
)
def test_only_as_many_paradigms_and_pairs_as_published_are_complete(tmp_path, monkeypatch, numbers, split) -> None:
    monkeypatch.setattr(blimp, "NUM_PARADIGMS", numbers[0])
    monkeypatch.setattr(blimp, "NUM_PAIRS", numbers[1])
    pairs = {uid: PAIRS[uid] for uid in ("agreement", "islands")}
    task = task_of(write_pairs(tmp_path / "pairs", pairs), "gpt")
    assert task.split == split
    files = sorted((tmp_path / "pairs").iterdir())
    assert task.file_sha256 == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


A, B = row("a", 0, "a dog", "dog a"), row("b", 0, "a cat", "cat a")


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"a.jsonl": [A, A | {"pairID": 3}]},
            r"must have a valid text `pairID` in each pair, but .*a\.jsonl line 2 has",
        ),
        (
            {"a.jsonl": [{k: v for k, v in A.items() if k != "field"}]},
            r"text `field` in each pair, but .*a\.jsonl line 1 ",
        ),
        (
            {"a.jsonl": [A | {"sentence_bad": None}]},
            r"text `sentence_bad` in each pair, but .*a\.jsonl line 1 has none",
        ),
        ({"a.jsonl": [A | {"sentence_good": "\ud800"}]}, r"text `sentence_good` in each pair, but .*a\.jsonl line 1 "),
        (
            {"a.jsonl": [A | {"sentence_good": " "}]},
            r"`sentence_good` must have a token or more, .* in .*a\.jsonl line 1",
        ),
        (
            {"a.jsonl": [A, A | {"pairID": "1", "sentence_bad": ""}]},
            r"`sentence_bad` must have a token or more, but has none in .*a\.jsonl line 2",
        ),
        ({"a.jsonl": [B]}, r"`UID` must be 'a' in all of its file, but .*a\.jsonl line 1 has 'b'"),
        (
            {"a.jsonl": [A, A | {"pairID": "1", "linguistics_term": "binding"}]},
            r"`linguistics_term` must be 'ellipsis' in all of its file, but .*a\.jsonl line 2 has 'binding'",
        ),
        (
            {"a.jsonl": [A, A | {"pairID": "1"}, A]},
            r"`pairID` must occur once, but .*a\.jsonl line 3 has '0', as line 1 does",
        ),
        ({"a.jsonl": [A], "a.jsonl.gz": [A]}, r"must hold one file per UID, but has .*a\.jsonl and .*a\.jsonl\.gz"),
        ({"a.jsonl": [A], "b.jsonl": []}, r"must hold files with pairs, but .*b\.jsonl is empty"),
        (
            {"a.jsonl": [A], "b.json": [B]},
            r"must hold only BLiMP's files, UID\.jsonl or UID\.jsonl\.gz, but has .*b\.json$",
        ),
        ({"a.jsonl": [A], "b.csv": [B]}, r"must hold only BLiMP's files, .* other types 1 \(the first is b\.csv\)"),
        ({"a.jsonl": [A], "b.jsonl.zst": [B]}, r"must hold only BLiMP's files, .* but has .*b\.jsonl\.zst"),
        ({"a.jsonl": '{"UID": "a"}\n\n{"UID": "a"}'}, r"`sentence_good` in each pair"),
        ({"a.jsonl": json.dumps(A) + "\n\n" + json.dumps(A)}, r"a\.jsonl line 2 must be JSON, but is blank"),
        ({"a.jsonl": json.dumps(A) + "\n[1]"}, r"a\.jsonl line 2 must be a JSON object"),
        ({"a.jsonl": json.dumps(A)[:-1]}, r"a\.jsonl line 1 must be JSON, but fails with"),
    ],
)
def test_a_file_of_another_form_raises_with_its_name_and_line(tmp_path, files, message) -> None:
    for name, rows in files.items():
        if isinstance(rows, str):
            (tmp_path / name).write_text(rows)
        else:
            write_file(tmp_path / name, *rows)
    with pytest.raises(ValueError, match=message) as raised:
        task_of(tmp_path, "bert")
    assert "\n" not in str(raised.value)


def test_a_linked_folder_raises_and_hidden_files_are_left_out(tmp_path) -> None:
    folder = write_pairs(tmp_path / "pairs")
    (folder / ".DS_Store").write_bytes(b"x")
    assert task_of(folder, "gpt").counts["pairs"] == 7
    (folder / "more").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ValueError, match=r"must hold only BLiMP's files, .* linked folders 1 \(the first is more\)"):
        task_of(folder, "gpt")
    with pytest.raises(ValueError, match=r"`task\.path` must be a file or a folder that can be read, but .*none"):
        task_of(tmp_path / "none", "gpt")


def test_pairs_of_two_files_may_have_the_same_number(tmp_path) -> None:
    write_file(tmp_path / "a.jsonl", A)
    write_file(tmp_path / "b.jsonl", B)
    assert [(pair.uid, pair.pair_id) for pair in task_of(tmp_path, "gpt").pairs] == [("a", "0"), ("b", "0")]


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_sentence_longer_than_the_positions_raises_with_its_line(tmp_path, family) -> None:
    folder = write_pairs(tmp_path / "pairs")
    longest = task_of(folder, family).counts["longest"] + (0 if family == "gpt" else 2)  # [CLS] and [SEP]
    task_of(folder, family, max_position_embeddings=longest)
    rule = rf"at most the model's positions \({longest - 1}\) long, but one of .*jsonl line 1 has {longest} tokens"
    with pytest.raises(ValueError, match=rule):
        task_of(folder, family, max_position_embeddings=longest - 1)


def test_a_tokenizer_of_the_other_family_raises(tmp_path) -> None:
    read = Blimp.read(TaskConfig("blimp", str(write_pairs(tmp_path / "pairs"))), tokenizer_of("gpt"))
    with pytest.raises(ValueError, match=r"must have the token \[CLS\]"):
        read.for_model(config_of("bert"))


def test_a_nan_likelihood_raises_with_its_line(tmp_path) -> None:
    task, model = task_of(write_pairs(tmp_path / "pairs"), "bert"), random_model(config_of("bert"), PLAIN).eval()
    longest = max(task.sentences, key=len)
    with torch.no_grad():
        model.transformer.position_embedding[len(longest) + 1] = float("nan")  # that of its [SEP]
    where = task.sentences[longest]
    assert where != task.sentences[task.items[0][0]]
    with pytest.raises(ValueError, match=rf"every sentence must be a number, but that of one of {where} is nan$"):
        task.score(model, 100)


def evaluation(tmp_path: Path, ckpt: Path, name: str = "run") -> ZeroShotConfig:
    task = {"name": "blimp", "path": str(write_pairs(tmp_path / "pairs"))}
    return ZeroShotConfig.from_dict({"run_dir": str(tmp_path / name), "task": task, "ckpt": str(ckpt)})


def test_a_bert_s_record_has_both_scores_and_the_answers(tmp_path) -> None:
    model = saved_model(config_of("bert", "post"))
    config = evaluation(tmp_path, save_gpt(tmp_path / "ours", model, tokenizer_of("bert")))
    assert evaluate(pickle.loads(pickle.dumps(prepare(config)))) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["name"], record["kind"], record["config"]["file"]["split"]) == (
        "zero_shot_blimp",
        "scaled_down",
        "other",
    )
    answers = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert [*answers[0]] == ["score", "uid", "pair_id", "good", "bad", "right"]
    for name in ("blimp", "blimp_word_l2r"):
        for uid, own in PAIRS.items():
            right = [answer["right"] for answer in answers if (answer["score"], answer["uid"]) == (name, uid)]
            assert len(right) == len(own) and record["metrics"][f"{name}/{uid}"]["value"] == pytest.approx(
                100 * fmean(right)
            )


def test_the_papers_setting_makes_no_run_of_a_benchmark_that_it_lacks(tmp_path) -> None:
    task = replace(task_of(write_pairs(tmp_path / "pairs"), "gpt"), split="complete")
    model = TransformerConfig("gpt", *GPT_SIZES["2.5B"], 50_257, 1024)
    assert task.record_kind(model, STEPS) == ("scaled_down", "2.5B")
    assert replace(task, split="test").record_kind(model, STEPS) == ("scaled_down", "2.5B")


def test_a_bert_without_a_trained_masked_lm_head_raises(tmp_path) -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=48
    )
    models = {"BertModel": "cls.predictions.bias", "BertForMaskedLM": "bert.pooler.dense.bias"}
    for name, head in models.items():
        getattr(transformers, name)(config).save_pretrained(tmp_path / name)
        tokenizer_of("bert").inner.save(str(tmp_path / name / "tokenizer.json"))
        with pytest.raises(ValueError, match=f"lacks the heads {head}.*; .* initialize_missing_heads=true begins"):
            load_model(tmp_path / name, PLAIN)
        import_hugging_face(tmp_path / name, tmp_path / f"{name}_ours", initialize_missing_heads=True)
    check_model(evaluation(tmp_path, tmp_path / "BertForMaskedLM_ours"), needs_causal=False)  # reads no other head
    rule = r"^`ckpt` must have a trained masked-LM head, but .*BertModel_ours.* has one that its import has drawn$"
    with pytest.raises(ValueError, match=rule):
        check_model(evaluation(tmp_path, tmp_path / "BertModel_ours"), needs_causal=False)


def test_a_finetuned_bert_raises(tmp_path) -> None:
    model = saved_model(config_of("bert"))
    del model.lm_head
    path = save_gpt(tmp_path, model)
    with pytest.raises(ValueError, match=r"^checkpoint step_7.ckpt lacks model/lm_head\.bias, [^\n]*$"):
        load_model(path, PLAIN)
