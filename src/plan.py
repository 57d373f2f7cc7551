"""What a training job costs: `python src/plan.py model=gpt_8.3b parallel.tp_size=8`; every key: conf/plan.yaml."""

import lmscale.cli.ctrl_c  # noqa: F401

# isort: split
import dataclasses
import json
import sys

from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.cli.next_command import ROOT, command, of_training
from lmscale.config.plan import PlanConfig
from lmscale.planner.plan_table import (
    format_operations,
    format_plan,
    format_ranking,
    plan_to_dict,
    ranking_to_dict,
    slowest_first,
)
from lmscale.planner.question import describe_validation_cost, plan_layout, rank
from lmscale.runtime.machine import describe_slow_type


def plan(values: dict) -> None:
    """Plan the requested layout, rank all layouts, with `parallel=auto` do both, or measure; print the result."""
    question = PlanConfig.from_dict(values)
    if question.measure:
        measure(question, of_training(values["overrides"]))
        return
    answers, text = {"name": question.name, "validation": describe_validation_cost(question)}, []
    if not question.best:
        found = plan_layout(question)
        if not question.cluster.is_gpu and (slow := describe_slow_type(found[0].job.dtype)):
            found[1].append(slow)
        answers |= plan_to_dict(*found)
        text.append(format_plan(question.name, *found))
        if question.operations:
            rows = slowest_first(found[0].rows)
            answers["operations"] = [dataclasses.asdict(row) | {"bound": row.bound} for row in rows]
            text.append(format_operations(rows))
    if question.best or question.parallel.tp_size == question.parallel.dp_size == "auto":
        ranking, notes = rank(question)
        answer = ranking_to_dict(ranking, question.top, notes)
        answers |= answer if question.best else {"ranking": answer}
        text.append(format_ranking(question.name, ranking, question.top, notes))
    text.append(f"validation: {answers['validation']}")
    print(json.dumps(answers, indent=1) if question.json else "\n\n".join(text))


def measure(question: PlanConfig, overrides: list[str]) -> None:
    """Train the best modelled layouts for a few steps, and print them beside the model."""
    from lmscale.training.measuring import format_measured, layout_overrides, measure_layouts  # imports torch

    record = measure_layouts(question, [sys.executable, str(ROOT / "src" / "train.py"), *overrides])
    best = command("src/train.py", *overrides, *layout_overrides(record["layouts"][0]))
    print(json.dumps(record, indent=1) if question.json else format_measured(record, question.record, best))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print("note: without keys this is model=gpt_8.3b cluster=dgx2h_v100 parallel=auto; see --help", file=sys.stderr)
        sys.argv.append("parallel=auto")
    run_hydra_main(lambda cfg: run_task(plan, cfg))
