"""What a training job costs before it is paid for: `python src/plan.py model=gpt_8.3b parallel.tp_size=8`; see
conf/plan.yaml for every key."""

import json

import hydra
from omegaconf import DictConfig

from lmscale.door import open_door, run_task
from lmscale.perf.job import Layout
from lmscale.perf.plan import describe_shortage
from lmscale.perf.plan_table import format_plan, format_ranking, plan_to_dict, ranking_to_dict
from lmscale.perf.search import largest_number, rank_layouts, way_out
from lmscale.plan_config import PlanConfig


def plan(values: dict) -> None:
    """Work out the plan, or rank all layouts, and print it."""
    config = PlanConfig.from_dict(values)
    if config.best:
        job, notes = config.job()
        num_devices = config.num_devices or largest_number(job, config.cluster)
        ranking = rank_layouts(job, config.cluster, num_devices, config.parallel.sequence_parallel)
        if not ranking.fitting:
            layout = Layout(1, num_devices, 1, job.config.recompute)
            closest = min(ranking.too_large, key=lambda plan: plan.missing_bytes)
            raise ValueError(
                f"`num_devices` must be a number of devices on which some layout fits, but on {num_devices:,} even "
                f"{closest.layout.overrides} does not: {describe_shortage(closest)}; "
                f"{way_out(job, layout, config.cluster)}"
            )
        show = ranking_to_dict if config.json else format_ranking
        arguments = (ranking, config.top, notes)
    else:
        show = plan_to_dict if config.json else format_plan
        arguments = config.plan()
    print(
        json.dumps({"name": config.name} | show(*arguments), indent=1) if config.json else show(config.name, *arguments)
    )


@hydra.main(version_base="1.3", config_path="../conf", config_name="plan")
def main(cfg: DictConfig) -> None:
    """Entry of Hydra, once for each job of a sweep."""
    run_task(plan, cfg)


if __name__ == "__main__":
    open_door(main)
