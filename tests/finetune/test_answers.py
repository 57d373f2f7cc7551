"""Answers against a search over every span of every window."""

import json

import numpy as np
import pytest
from finetuning import make_task, make_tokenizer, write_task

from lmscale.finetune.answers import decode_answers
from lmscale.finetune.features import Features, load_features
from lmscale.finetune.metrics import accuracy, f1
from lmscale.finetune.preparing import prepare_features
from lmscale.finetune.scoring import metric_names, predict_sets
from lmscale.finetune.tasks.race import score_race


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    place = write_task(folder, "squad_v2", 30)
    return load_features(prepare_features(make_task("squad_v2"), str(place), make_tokenizer(), folder / "cache"))


def random_logits(features, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    lengths = np.diff(features.starts)
    return [generator.normal(size=(2, length)).astype(np.float32) for length in lengths]


def all_spans(features, logits, example: int, longest: int):
    """Every allowed span of an example's windows as (score, text), by brute force."""
    dataset = features.facts["dataset"]["data"][0]["paragraphs"]
    context = [p["context"] for p in dataset for _ in p["qas"]][example]
    windows = np.flatnonzero(features.window_examples == example)
    spans = []
    for window in windows:
        offsets = features.offsets[features.starts[window] : features.starts[window + 1]]
        tokens = np.flatnonzero(offsets[:, 0] >= 0)
        for first in tokens:
            mine = context_of(features, window, features.window_starts[window] + first - tokens[0])
            others = [
                context_of(features, other, features.window_starts[window] + first - tokens[0]) for other in windows
            ]
            if mine < max(others) or others.index(max(others)) != list(windows).index(window):
                continue
            for last in tokens[(tokens >= first) & (tokens < first + longest)]:
                score = float(logits[window][0, first]) + float(logits[window][1, last])
                spans.append((score, context[offsets[first, 0] : offsets[last, 1]]))
    return sorted(spans, reverse=True)


def context_of(features, window: int, token: int) -> float:
    """How much context a token of the document has in a window; -1 if it is outside."""
    length = features.starts[window + 1] - features.starts[window] - features.second_starts[window] - 1
    place = token - features.window_starts[window]
    return min(place, length - 1 - place) + 0.01 * length if 0 <= place < length else -1.0


def test_the_best_answers_equal_those_of_a_search_over_all_spans(features) -> None:
    logits = random_logits(features)
    found = decode_answers(features, logits, num_best=40, max_answer_length=6)
    several = 0
    for example, name in enumerate(features.ids):
        spans = all_spans(features, logits, example, 6)
        assert found[name].text == spans[0][1]
        assert found[name].answers[0][1] == pytest.approx(spans[0][0], abs=1e-6)
        texts = list(dict.fromkeys(text for _, text in spans))[:5]
        assert [text for text, _ in found[name].answers[:5]] == texts
        windows = np.flatnonzero(features.window_examples == example)
        several += len(windows) > 1
        assert found[name].null_score == pytest.approx(min(float(logits[w][0, 0] + logits[w][1, 0]) for w in windows))
    assert several > 5


def test_a_perfect_model_gets_every_question_right(features) -> None:
    logits = random_logits(features)
    for window, row in enumerate(logits):
        first, last = features.labels[window]
        row[0, first] += 20.0
        row[1, last] += 20.0
    predictions, metrics = predict_sets(make_task("squad_v2"), {"dev": features}, {"dev": logits}, ["dev"])
    assert metrics["squad_v2/f1"] == metrics["squad_v2/exact_match"] == 100.0
    assert metrics["squad_v2/HasAns_exact"] == metrics["squad_v2/NoAns_exact"] == 100.0
    assert predictions["dev"].alarms == [] and np.isfinite(metrics["squad_v2/null_threshold"])


def test_a_model_that_never_answers_warns(features) -> None:
    logits = random_logits(features)
    for row in logits:
        row[:, 0] += 100.0
    task = make_task("squad_v2", null_threshold=0.0)
    predictions, metrics = predict_sets(task, {"dev": features}, {"dev": logits}, ["dev"])
    assert set(predictions["dev"].answers.values()) == {""}
    assert metrics["squad_v2/f1"] == pytest.approx(100 / 3)
    assert "never answers" in predictions["dev"].alarms[0]


def test_the_development_sets_threshold_is_used_for_the_other_sets(features) -> None:
    logits, others = random_logits(features), random_logits(features, seed=1)
    task = make_task("squad_v2", validation={"dev": "x"}, test={"held": "y"})
    sets = {"dev": features, "held": features}
    _, metrics = predict_sets(task, sets, {"dev": logits, "held": others}, ["dev"])
    # -inf, which rejects every answer, is found but cannot be given.
    given = make_task("squad_v2", null_threshold=max(metrics["squad_v2/null_threshold"], -1e9))
    _, alone = predict_sets(given, {"held": features}, {"held": others}, [])
    assert alone["squad_v2/f1_held"] == metrics["squad_v2/f1_held"]
    _, at_zero = predict_sets(make_task("squad_v2", null_threshold=0.0), sets, {"dev": logits, "held": others}, ["dev"])
    assert at_zero["squad_v2/null_threshold"] == 0.0 != metrics["squad_v2/null_threshold"]
    with pytest.raises(ValueError, match="null_threshold"):
        predict_sets(make_task("squad_v2"), {"held": features}, {"held": others}, [])


def test_dropped_characters_belong_to_the_token_that_they_touch(tmp_path) -> None:
    """As in google-research/bert's final text: a word keeps its dropped characters, and no other word's."""
    tokenizer = make_tokenizer()
    contexts = {
        "cat\u0301 sat": ["cat\u0301", "sat"],
        "cat \u0301sat": ["cat", "\u0301sat"],
        "\ufeffcat \u0301 sat\u200b\u200e": ["\ufeffcat", "sat\u200b\u200e"],
        "\u0301 cat.\u0301sat": ["cat", ".\u0301", "sat"],
        "\u0301\u200b": [],
    }
    paragraphs = [{"context": c, "qas": [{"id": str(n), "question": "q"}]} for n, c in enumerate(contexts)]
    (tmp_path / "t.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    place = str(tmp_path / "t.json")
    found = load_features(prepare_features(make_task("squad_v1"), place, tokenizer, tmp_path / "cache"))
    for window, (context, expected) in enumerate(contexts.items()):
        offsets = found.offsets[found.starts[window] : found.starts[window + 1]]
        assert [context[begin:end] for begin, end in offsets if begin >= 0] == expected


def test_a_single_set_of_another_name_than_dev_has_the_plain_metrics_too() -> None:
    own = Features(*3 * [np.zeros(3)], labels=np.array([0, 1]), ids=["a", "b"])
    names = metric_names(make_task("qqp"), {"own": own}, ["own"])
    assert names == ["qqp/accuracy", "qqp/f1", "qqp/accuracy_own", "qqp/f1_own"]


def test_a_test_set_with_labels_is_not_pooled() -> None:
    sets, logits = {}, {}
    for name, labels in (("own", [0, 1]), ("held", [1, 1])):
        sets[name] = Features(*3 * [np.zeros(3)], labels=np.array(labels), ids=["a", "b"])
        logits[name] = list(np.eye(2))
    _, metrics = predict_sets(make_task("qqp"), sets, logits, ["own"])
    assert (metrics["qqp/accuracy"], metrics["qqp/accuracy_held"]) == (100.0, 50.0)


def test_scores_of_classes_count_by_hand() -> None:
    chosen, labels = [1, 1, 0, 0, 1, 0, 1], [1, 0, 0, 1, 1, 0, 0]
    assert (accuracy(chosen, labels), f1(chosen, labels)) == pytest.approx((100 * 4 / 7, 100 * 2 * 2 / 7))
    assert f1([0], [0]) == 0.0  # no question is a duplicate
    groups = ["middle", "high", "high", "middle", "middle", "high", "high"]
    expected = {"race/accuracy": 100 * 4 / 7, "race/accuracy_middle": 100 * 2 / 3, "race/accuracy_high": 50.0}
    assert score_race(chosen, labels, {"groups": groups}) == pytest.approx(expected)
