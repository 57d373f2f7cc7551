"""`lmscale COMMAND KEY=VALUE ...`, also `python -m lmscale`: the entry points of a clone, from any folder.

It runs the script of the command in the clone that this package is installed from (`pip install -e CLONE`).
"""

import runpy
import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]
COMMANDS = {
    "train": ("src/train.py", "pretrain BERT or GPT"),
    "plan": ("src/plan.py", "say what a job needs: memory, time, energy"),
    "prepare": ("src/prepare_data.py", "turn raw text into a corpus"),
    "finetune": ("finetune/run.py", "finetune a BERT and score it"),
    "evaluate": ("src/zero_shot.py", "evaluate a GPT zero-shot"),
    "generate": ("src/generate.py", "continue a text"),
    "cache": ("src/cache_logits.py", "store what a teacher predicts for a run's samples"),
    "convert": ("src/convert.py", "reshard a checkpoint, or exchange it with Hugging Face"),
}


def main() -> None:
    """Run a command; without one, list them. Exit code 2: there is no such command, or this is not a clone."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("--help", "-h"):
        lines = [f"  {name:9} {meaning}  ({script})" for name, (script, meaning) in COMMANDS.items()]
        print("lmscale COMMAND KEY=VALUE ...", *lines, "lmscale COMMAND --help has examples and groups", sep="\n")
        return
    if command not in COMMANDS:
        from .config.checks import did_you_mean

        meant = did_you_mean(command, COMMANDS)
        sys.exit(_refuse(f"the command must be one of {', '.join(COMMANDS)}, but is {command!r}{meant}"))
    script = CLONE / COMMANDS[command][0]
    if not (CLONE / "conf").is_dir() or not script.is_file():
        sys.exit(_refuse(f"`lmscale` must be installed from a clone (pip install -e CLONE), but {CLONE} has no conf/"))
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
