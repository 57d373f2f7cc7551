"""Rank the settings of a sweep by median development score: `python finetune/median.py multirun/finetune_race/TIME`.

A sweep over seeds gives one line: the value for Table 5, and the run whose checkpoint the protocol evaluates on the
test set:

    python finetune/run.py task=race ckpt=THAT_RUN trainer.num_epochs=0 '+task.test.test=RACE/test'
"""

import argparse
import sys

from lmscale.cli.errors import one_line_errors
from lmscale.finetune.protocol import read_settings, shown
from lmscale.results import existing_path


@one_line_errors()
def main() -> int:
    """Read the records, rank the settings and print them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=existing_path, help="folder of a sweep, or any folder that contains run folders")
    parser.add_argument("--metric", default=None, help="default: the task's accuracy, or F1 for SQuAD")
    options = parser.parse_args()
    settings = read_settings(options.folder, options.metric)
    for setting in settings:
        values = " ".join(f"{key}={value}" for key, value in setting.differing.items()) or "one setting"
        scores = ", ".join(map(shown, sorted(setting.scores.values())))
        print(f"{shown(setting.median)}  {values}  of {len(setting.scores)}: {scores}  median: {setting.median_run}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
