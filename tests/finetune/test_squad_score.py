"""SQuAD's scores against those of the official scripts for published predictions."""

import json

import pytest

from lmscale.finetune.squad_score import all_null_alarm, best_null_threshold, f1, normalize_answer, score

OFFICIAL = {
    "v1.1-bert_ensemble": (86.13698630136986, 92.36836157555327),
    "v1.1-match_lstm_ensemble": (67.37899543378995, 76.78010195236371),
    "v1.1-logistic_regression": (41.71689497716895, 52.3024335767101),
    "v2.0-bert_single": (78.97334649555775, 81.8263553319829),
    "v2.0-nlnet_single": (76.39025995393222, 79.25737675069165),
}
PARTS = {
    "v2.0-bert_single": (75.39518900343643, 81.35415385147489, 82.26010101010101),
    "v2.0-nlnet_single": (72.40549828178695, 78.39392985934829, 80.05050505050505),
}


def read(folder, name: str) -> dict:
    return json.loads((folder / "squad" / f"{name}.shared.json").read_text(encoding="utf-8"))


def dataset(*questions: tuple[str, list[str]], version: str = "v2.0") -> dict:
    qas = [{"id": name, "question": "?", "answers": [{"text": a} for a in answers]} for name, answers in questions]
    return {"version": version, "data": [{"title": "t", "paragraphs": [{"context": "c", "qas": qas}]}]}


@pytest.mark.parametrize("name", OFFICIAL)
def test_published_predictions_get_their_official_scores_exactly(shared_data, name) -> None:
    scores = score(read(shared_data, f"dev-{name.split('-')[0]}"), read(shared_data, f"predictions-{name}"))
    assert (scores["exact_match"], scores["f1"]) == OFFICIAL[name]
    if name in PARTS:
        assert (scores["HasAns_exact"], scores["HasAns_f1"], scores["NoAns_exact"]) == PARTS[name]
        assert scores["NoAns_f1"] == PARTS[name][2]
        assert (scores["HasAns_total"], scores["NoAns_total"], scores["total"]) == (2910, 3168, 6078)
    else:
        assert not any(key.startswith(("HasAns", "NoAns")) for key in scores)
    assert all_null_alarm(scores) is None


def test_answers_are_compared_without_case_punctuation_and_articles() -> None:
    assert normalize_answer(" The  Cat,\nand an owl's (A) ") == "cat and owls"
    assert f1("the cat sat sat", "a cat sat down") == pytest.approx(2 * (2 / 3) * (2 / 3) / (4 / 3))


def test_never_answering_warns_and_scores_the_percentage_of_unanswerable_questions(shared_data) -> None:
    questions = read(shared_data, "dev-v2.0")
    names = [qa["id"] for a in questions["data"] for p in a["paragraphs"] for qa in p["qas"]]
    scores = score(questions, dict.fromkeys(names, ""))
    assert scores["f1"] == scores["exact_match"] == pytest.approx(100 * 3168 / 6078)
    assert "never answers" in all_null_alarm(scores)


def test_the_empty_answer_is_right_only_for_unanswerable_questions_of_version_2() -> None:
    assert score(dataset(("1", []), ("2", ["x"])), {"1": "", "2": "y"})["f1"] == 50.0
    assert score(dataset(("1", [".", "x"]), ("2", ["x"]), version="1.1"), {"1": "", "2": "x"})["f1"] == 50.0


def test_the_threshold_equals_that_of_a_search_over_all_values(shared_data) -> None:
    questions = read(shared_data, "dev-v2.0")
    questions["data"] = questions["data"][:2]
    said = read(shared_data, "predictions-v2.0-nlnet_single")
    answers = {qa["id"]: qa["answers"] for a in questions["data"] for p in a["paragraphs"] for qa in p["qas"]}
    predictions = {name: said[name] or "something" for name in answers}
    # A null score that is right more often than not, with ties.
    nulls = {name: round((not said[name]) + len(name + predictions[name]) % 7 / 5, 1) for name in answers}
    best = best_null_threshold(questions, predictions, nulls)

    def at(threshold: float) -> float:
        chosen = {name: text if nulls[name] <= threshold else "" for name, text in predictions.items()}
        return score(questions, chosen)["f1"]

    tried = {value: at(value) for value in {-float("inf"), *nulls.values()}}
    assert at(best) == pytest.approx(max(tried.values()), abs=1e-9)
    assert at(best) > at(float("inf")) + 1  # the threshold matters here


def test_questions_of_one_null_score_are_answered_together_or_not_at_all() -> None:
    """Answering the first alone would be best, but no threshold divides the first two."""
    questions = dataset(("right", ["x"]), ("wrong", []), ("later", []))
    predictions = dict.fromkeys(("right", "wrong", "later"), "x")
    assert best_null_threshold(questions, predictions, {"right": 0, "wrong": 0, "later": 1}) == -float("inf")
    assert best_null_threshold(questions, predictions, {"right": 0, "wrong": 1, "later": 1}) == 0
