"""Model inputs: pairs, RACE's options, SQuAD's windows, each against a plain construction."""

import json
import shutil

import numpy as np
import pytest
from finetuning import make_task, make_tokenizer, write_task

from lmscale.finetune.examples import PairExample
from lmscale.finetune.features import load_features
from lmscale.finetune.pairs import clean_text, encode_pairs, join_option, join_pair
from lmscale.finetune.preparing import prepare_features
from lmscale.finetune.windows import window_starts


def features(tmp_path, name: str, count: int = 40, **changes):
    place = write_task(tmp_path, name, count)
    return load_features(prepare_features(make_task(name, **changes), str(place), make_tokenizer(), tmp_path / "cache"))


def test_text_is_cleaned_as_megatron_does() -> None:
    assert clean_text("a\n b\t\tc . d") == "a b c. d"
    assert clean_text("a . b . c") == "a. b. c"
    assert clean_text("x\u00a0 y") == "x y"


@pytest.mark.parametrize(
    "first, second", [([5, 6], [7, 8, 9]), ([5, 6], [7] * 20), ([5] * 20, [7]), ([5] * 7, [7] * 3), ([5] * 4, [7] * 4)]
)
def test_long_pairs_are_truncated_and_end_in_sep(first, second) -> None:
    ids, start = join_pair(first, second, 1, 2, 10)
    whole = [1, *first, 2, *second]
    assert ids == (whole if len(whole) < 10 else whole[:9]) + [2]
    assert start == min(len(first) + 2, len(ids)) and len(ids) <= 10


def test_pairs_hold_both_sentences_and_their_boundary(tmp_path) -> None:
    found, tokenizer = features(tmp_path, "mnli"), make_tokenizer()
    rows = [line.split("\t") for line in (tmp_path / "mnli_0.tsv").read_text().split("\n")[1:-1]]
    names = ["contradiction", "entailment", "neutral"]
    for number, row in enumerate(rows):
        a, b = tokenizer.encode_batch([row[8], row[9]])
        ids = [tokenizer.id_of("[CLS]"), *a, tokenizer.id_of("[SEP]"), *b, tokenizer.id_of("[SEP]")]
        assert found.tokens[found.starts[number] : found.starts[number + 1]].tolist() == ids
        assert found.second_starts[number] == len(a) + 2
        assert names[found.labels[number]] == row[11]
    assert found.ids == [row[0] for row in rows] and found.is_labelled


@pytest.mark.parametrize("labels, is_labelled", [([-1.0, -2.0], True), ([None, None], False)])
def test_a_number_may_be_negative_or_unknown(labels: list, is_labelled: bool) -> None:
    examples = [PairExample(str(n), "cat", "dog", label) for n, label in enumerate(labels)]
    found = encode_pairs(make_task("stsb", value_range=[-2, 2]), examples, make_tokenizer())
    assert found.is_labelled == is_labelled


def test_an_option_fills_the_gap_or_follows_the_question() -> None:
    assert join_option("the _ sat _ .", "cat") == "the cat sat cat ."
    assert join_option("who sat ?", "cat") == "who sat ? cat"


def test_a_question_of_race_is_four_sequences_with_the_option_first(tmp_path) -> None:
    found, tokenizer = features(tmp_path, "race"), make_tokenizer()
    passages = [json.loads(line) for line in (tmp_path / "race_0.jsonl").read_text().splitlines()]
    assert found.num_choices == 4 and len(found.starts) == 4 * 40 + 1 and len(found) == 40
    for number, passage in enumerate(passages):
        for choice, option in enumerate(passage["options"][0]):
            asked, article = tokenizer.encode_batch([passage["questions"][0].replace("_", option), passage["article"]])
            ids, start = join_pair(asked[:16], article, tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]"), 48)
            row = number * 4 + choice
            assert found.tokens[found.starts[row] : found.starts[row + 1]].tolist() == ids
            assert found.second_starts[row] == start
        assert found.labels[number] == "ABCD".index(passage["answers"][0])
    assert found.facts["groups"] == [("middle", "high")[n % 2] for n in range(40)]


@pytest.mark.parametrize("name", ["race", "squad_v1"])
def test_the_first_items_have_the_ids_of_their_examples(tmp_path, name) -> None:
    found = features(tmp_path, name)
    owners = range(len(found)) if found.window_examples is None else found.window_examples
    assert (len(found) > len(found.ids)) == (name == "squad_v1")
    for count in range(1, len(found)):
        assert found.first(count).ids == list(dict.fromkeys(found.ids[owner] for owner in owners[:count]))


def test_question_and_option_are_truncated(tmp_path) -> None:
    found = features(tmp_path, "race", max_qa_length=3)
    assert set(found.second_starts.tolist()) == {5}


@pytest.mark.parametrize("num_tokens", [0, 1, 9, 10, 11, 25, 26, 100])
def test_windows_cover_every_token_of_a_context(num_tokens: int) -> None:
    starts = window_starts(num_tokens, 10, 4)
    covered = {token for first in starts for token in range(first, min(first + 10, num_tokens))}
    assert covered == set(range(num_tokens))
    assert starts == [4 * i for i in range(len(starts))]
    assert len(starts) == 1 or starts[-2] + 10 < num_tokens  # none more than needed


@pytest.mark.parametrize("name", ["squad_v1", "squad_v2"])
def test_every_label_of_a_window_is_the_answer_in_the_context(tmp_path, name: str) -> None:
    found = features(tmp_path, name)
    paragraphs = found.facts["dataset"]["data"][0]["paragraphs"]
    labelled = set()
    assert len(found) > 60  # several windows for many
    for window in range(len(found)):
        example = int(found.window_examples[window])
        qa, context = paragraphs[example]["qas"][0], paragraphs[example]["context"]
        first, last = found.labels[window]
        offsets = found.offsets[found.starts[window] : found.starts[window + 1]]
        inside = offsets[offsets[:, 0] >= 0]
        if first == 0:
            held = inside[0][0], inside[-1][1]
            for answer in qa["answers"]:  # the window does not contain all of it
                begin = answer["answer_start"]
                assert begin < held[0] or begin + len(answer["text"]) > held[1]
            assert last == 0
        else:
            labelled.add(example)
            assert context[offsets[first][0] : offsets[last][1]] == qa["answers"][0]["text"]
    assert labelled == {n for n in range(40) if paragraphs[n]["qas"][0]["answers"]}


def test_offsets_and_types_match_the_tokens(tmp_path) -> None:
    found, tokenizer = features(tmp_path, "squad_v1"), make_tokenizer()
    for window in range(len(found)):
        ids = found.tokens[found.starts[window] : found.starts[window + 1]]
        offsets = found.offsets[found.starts[window] : found.starts[window + 1]]
        start = found.second_starts[window]
        assert ids[0] == tokenizer.id_of("[CLS]") and ids[start - 1] == ids[-1] == tokenizer.id_of("[SEP]")
        assert (offsets[:start] == -1).all() and (offsets[-1] == -1).all() and (offsets[start:-1] >= 0).all()
        assert len(ids) <= 40


def test_real_answers_are_recovered_from_their_windows(shared_data, tmp_path) -> None:
    from lmscale.config.data import TokenizerConfig
    from lmscale.data.tokenizer import load_published_tokenizer

    data = json.loads((shared_data / "squad/dev-v1.1.shared.json").read_text(encoding="utf-8"))
    data["data"] = data["data"][:4]
    (tmp_path / "dev.json").write_text(json.dumps(data), encoding="utf-8")
    tokenizer = load_published_tokenizer(TokenizerConfig("bert", path=str(shared_data / "bert-uncased")), "bert")
    task = make_task("squad_v1", max_seq_length=384, doc_stride=128, max_query_length=64)
    found = load_features(prepare_features(task, str(tmp_path / "dev.json"), tokenizer, tmp_path / "cache"))
    flat = [(p["context"], qa) for a in found.facts["dataset"]["data"] for p in a["paragraphs"] for qa in p["qas"]]
    same, labelled = 0, 0
    for window in np.flatnonzero(found.labels[:, 0] > 0):
        context, qa = flat[found.window_examples[window]]
        offsets = found.offsets[found.starts[window] : found.starts[window + 1]]
        first, last = found.labels[window]
        labelled += 1
        same += context[offsets[first][0] : offsets[last][1]] == qa["answers"][0]["text"]
    # The rest are answers inside a word ("Japan" of "Japanese"), which tokens cannot express.
    assert labelled >= len(flat) and same / labelled > 0.99


def test_texts_that_the_tokenizer_cannot_spell_are_noted(tmp_path) -> None:
    assert features(tmp_path, "qqp").notes == []
    place = write_task(tmp_path, "qqp", 5)
    place.write_text(place.read_text().replace("cat", "γάτα"))
    found = load_features(prepare_features(make_task("qqp"), str(place), make_tokenizer(), tmp_path / "cache"))
    share = (found.tokens == make_tokenizer().id_of("[UNK]")).mean()
    (note,) = found.notes
    assert share > 0 and note.startswith(f"{share:.1%} of the tokens are [UNK], ")


def test_features_are_cached_by_files_and_settings(tmp_path) -> None:
    place, tokenizer, cache = write_task(tmp_path, "qqp", 5), make_tokenizer(), tmp_path / "cache"
    first = prepare_features(make_task("qqp"), str(place), tokenizer, cache)
    stamp = (first / "tokens.npy").stat().st_mtime_ns
    assert prepare_features(make_task("qqp"), str(place), tokenizer, cache) == first
    assert (first / "tokens.npy").stat().st_mtime_ns == stamp
    assert prepare_features(make_task("qqp", max_seq_length=16), str(place), tokenizer, cache) != first
    scored = str(write_task(tmp_path, "stsb", 5))
    ranges = [make_task("stsb", value_range=[0, high]) for high in (5, 9)]
    assert len({prepare_features(task, scored, tokenizer, cache) for task in ranges}) == 2
    place.write_text(place.read_text() + "99\t0\t0\ta\tb\t1\n")
    assert len(load_features(prepare_features(make_task("qqp"), str(place), tokenizer, cache))) == 6
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]
    for suffix, rule in ((".jsonl", "line 1 must be JSON"), (".tsv.gz", "must be readable as UTF-8 text")):
        other = shutil.copy(place, place.with_suffix(suffix))
        with pytest.raises(ValueError, match=f"{other} {rule}"):
            prepare_features(make_task("qqp"), str(other), tokenizer, cache)


@pytest.mark.parametrize("name", ["tokens.npy", "features.json"])
@pytest.mark.parametrize("content", [b"", b"{}", None], ids=["empty", "of other content", "missing"])
def test_damaged_features_in_the_cache_are_named(tmp_path, name, content) -> None:
    arguments = make_task("qqp"), str(write_task(tmp_path, "qqp", 5)), make_tokenizer(), tmp_path / "cache"
    folder = prepare_features(*arguments)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{folder} is damaged; remove it to have it built again$"):
        prepare_features(*arguments)


@pytest.mark.parametrize(
    "name, changes",
    [
        *(("squad_v1", {key: value}) for key, value in (("max_query_length", 3), ("doc_stride", 4))),
        ("squad_v1", {"max_seq_length": 36}),
        ("race", {"max_qa_length": 3}),
    ],
)
def test_features_are_encoded_again_for_another_length(tmp_path, name: str, changes: dict[str, int]) -> None:
    before, after = (features(tmp_path, name, **values) for values in ({}, changes))
    assert not np.array_equal(before.tokens, after.tokens)
