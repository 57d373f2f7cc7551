"""The reports of a finished preparation."""

import pyarrow as pa
from input_files import plan_of

from lmscale.config.corpus import EvaluationSetConfig
from lmscale.corpus.evaluation_sets import EVALUATION_TEXTS, evaluation_index
from lmscale.corpus.finalizing import FinalizeDataset
from lmscale.corpus.plan import save_array, save_json


def test_documents_of_equal_names_in_two_sources_are_counted_as_two(tmp_path) -> None:
    """A document that contains two items counts once."""
    plan = plan_of(tmp_path, num_tasks=1, evaluation_sets={"quiz": EvaluationSetConfig("records", path="quiz.jsonl")})
    save_json(plan.path(EVALUATION_TEXTS), {"quiz": ["a b c d e f g h i", "1 2 3 4 5 6 7 8 9"]})
    save_array(plan.shard_file("overlap", 0, "seen.npy"), evaluation_index(plan).new_seen())
    found = [("books", "quiz/0"), ("books", "quiz/1"), ("news", "quiz/0")]
    rows = [{"source": source, "file": "a.txt", "row": 1, "item": item} for source, item in found]
    report = FinalizeDataset(plan)._leakage(pa.Table.from_pylist(rows))
    assert report["quiz"]["documents_removed"] == 2
