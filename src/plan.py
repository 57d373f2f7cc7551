"""What a training job costs before it is paid for: `python src/plan.py model=gpt_8.3b parallel.tp_size=8`; see
conf/plan.yaml for every key."""

import json

import hydra
from omegaconf import DictConfig

from lmscale.cli.entry_point import open_door, run_task
from lmscale.config.plan import PlanConfig
from lmscale.planner.job import Job, Layout
from lmscale.planner.plan import describe_shortage
from lmscale.planner.plan_table import format_plan, format_ranking, plan_to_dict, ranking_to_dict
from lmscale.planner.search import Ranking, largest_number, rank_layouts, way_out


def plan(values: dict) -> None:
    """Work out the plan, rank all layouts, or with `parallel=auto` both, and print it."""
    config = PlanConfig.from_dict(values)
    answers, text = {"name": config.name}, []
    if not config.best:
        found = config.plan()
        answers |= plan_to_dict(*found)
        text.append(format_plan(config.name, *found))
    if config.best or (config.parallel.tp_size == "auto" and config.parallel.dp_size == "auto"):
        job, notes = config.job()
        ranking = _rank(config, job)
        answer = ranking_to_dict(ranking, config.top, notes)
        answers |= answer if config.best else {"ranking": answer}
        text.append(format_ranking(config.name, ranking, config.top, notes if config.best else []))
    print(json.dumps(answers, indent=1) if config.json else "\n\n".join(text))


def _rank(config: PlanConfig, job: Job) -> Ranking:
    """All layouts of the job; a ValueError where none fits."""
    num_devices = config.num_devices or largest_number(job, config.cluster)
    cuts = config.parallel.sequence_parallel, config.parallel.zero1
    ranking = rank_layouts(job, config.cluster, num_devices, *cuts)
    if not ranking.fitting:
        layout = Layout(1, num_devices, 1, job.config.recompute)
        closest = min(ranking.too_large, key=lambda plan: plan.missing_bytes)
        raise ValueError(
            f"`num_devices` must be a number of devices on which some layout fits, but on {num_devices:,} even "
            f"{closest.layout.overrides} does not: {describe_shortage(closest)}; "
            f"{way_out(job, layout, config.cluster)}"
        )
    return ranking


@hydra.main(version_base="1.3", config_path="../conf", config_name="plan")
def main(cfg: DictConfig) -> None:
    """Entry of Hydra, once for each job of a sweep."""
    run_task(plan, cfg)


if __name__ == "__main__":
    open_door(main)
