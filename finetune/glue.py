"""Print GLUE's table of finetunings, and write the submission: `python finetune/glue.py multirun/glue/TIME`.

A task's score is the median over seeds of its best setting. `submission.zip` in the folder holds the median runs'
predictions of the test sets (`task.submit=true`).
"""

import argparse
import math
import statistics
import sys

from lmscale.cli.errors import one_line_errors
from lmscale.config.finetune import GLUE
from lmscale.finetune.glue import DEV_ROWS, TEST_ROWS, TaskScore, read_scores, write_submission
from lmscale.finetune.protocol import shown
from lmscale.results import existing_path


def row_of(task: str, found: TaskScore) -> str:
    """A task's line of the table."""
    about = [f"{name.partition('/')[2]} {shown(value)}" for name, value in found.metrics.items()]
    about.append(f"median of {len(found.setting.scores)}")
    if found.num_settings > 1:
        about.append(f"best of {found.num_settings} settings")
    published = sum(DEV_ROWS[task].values())
    if found.num_examples != published:
        about.append(f"{found.num_examples:,} of {published:,} examples")
    return f"{GLUE[task]:<6} {shown(found.score):>9}  {', '.join(about)}"


@one_line_errors()
def main() -> int:
    """Read the records, print the table, and write the submission."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=existing_path, help="folder of a sweep, or any folder that contains run folders")
    folder = parser.parse_args().folder
    scores = read_scores(folder)
    for task, found in scores.items():
        print(row_of(task, found))
    counted = [found.score for found in scores.values() if math.isfinite(found.score)]
    missing = [name for task, name in GLUE.items() if task not in scores or not math.isfinite(scores[task].score)]
    mean = statistics.mean(counted) if counted else -math.inf
    lacks = f", without {', '.join(missing)}" if missing else ""
    name = f"mean of {len(counted)} task{'s' * (len(counted) != 1)}" if missing else "GLUE score"
    print(f"{name} {shown(mean)}{lacks}")
    problems = write_submission(scores, folder / "submission.zip")
    if len(problems) == len(TEST_ROWS):
        print("no submission: no median run has predicted a test set (task.submit=true)")
        return 0
    for name, problem in problems.items():
        print(f"submission without {name}: {problem}")
    print(f"submission: {folder / 'submission.zip'}, {len(TEST_ROWS) - len(problems)} of {len(TEST_ROWS)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
