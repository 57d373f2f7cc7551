"""Zero-shot evaluation (Table 3): `python src/zero_shot.py task=lambada ckpt=...`; every key: conf/zero_shot.yaml."""

import lmscale.cli.ctrl_c  # noqa: F401

# isort: split
from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.cli.next_command import use_model
from lmscale.config.zero_shot import ZeroShotConfig
from lmscale.runtime.world import is_first_rank


def evaluate(values: dict) -> None:
    """Build the config and the job, then start the ranks (or join those of torchrun or srun)."""
    config = ZeroShotConfig.from_dict(values)
    # torch takes seconds to import, so the cheap checks above come first.
    from lmscale.evaluation import zero_shot_job
    from lmscale.runtime.launch import launch

    job = zero_shot_job.prepare(config)
    if config.count_only:
        print(*(f"{name} = {number}" for name, number in job.task.counts.items()), sep="\n")
        return
    launch(zero_shot_job.evaluate, job, config.parallel.world_size)
    if is_first_rank():
        print(f"use: {use_model(config.ckpt, job.model.family, tokenizer=config.tokenizer.words())}")


if __name__ == "__main__":
    run_hydra_main(lambda cfg: run_task(evaluate, cfg), joins_ranks=True)
