"""Text from a GPT: `python src/generate.py ckpt=... prompt="Once upon a time"`; every key: conf/generate.yaml."""

import lmscale.cli.ctrl_c  # noqa: F401

# isort: split
import sys

from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.cli.next_command import command
from lmscale.config.generate import GenerateConfig
from lmscale.runtime.world import is_first_rank


def generate(values: dict) -> None:
    """Build the config and the job, then start the ranks (or join those of torchrun or srun)."""
    config = GenerateConfig.from_dict(values)
    # torch takes seconds to import, so the cheap checks above come first.
    from lmscale.evaluation import generate_job
    from lmscale.runtime.launch import launch

    launch(generate_job.generate, generate_job.prepare(config), config.parallel.tp_size)
    if not config.interactive and is_first_rank():  # standard output is for the text
        more = command("src/generate.py", f"ckpt={config.ckpt}", *config.tokenizer.words(), "interactive=true")
        print(f"type prompts: {more}", file=sys.stderr)


if __name__ == "__main__":
    run_hydra_main(
        lambda cfg: run_task(generate, cfg),
        literal=("ckpt", "prompt", "file", "out", "tokenizer.path"),
        joins_ranks=True,
    )
