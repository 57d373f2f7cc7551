"""Plans as a table, as a ranking, or as plain values."""

import dataclasses
from collections import defaultdict

from .memory import GIB, MemoryEstimate, keeps_scores
from .plan import Plan
from .search import Ranking
from .step_time import StepRow

_OPTIONS = {"zero1": "zero1", "batch_halves": "halves", "sequence_parallel": "seq"}  # heads of their columns
_COMPARED = ("tp_size", "pp_size", "dp_size", "micro_batch_size", "recompute")  # in every ranking
_PARTS = [each.name for each in dataclasses.fields(MemoryEstimate)]  # the first 7 and a teacher's are shown
_ADDED = [each.name for each in dataclasses.fields(StepRow) if each.type in (int, float)]
_TIMES = (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440))  # in days
_ENERGIES = (("MWh", 1.0), ("kWh", 1e-3), ("Wh", 1e-6))  # in MWh
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def plan_to_dict(plan: Plan, notes: list[str]) -> dict:
    """Plain values of everything a table shows, ready for JSON; every quantity's unit is in its name."""
    time = plan.time
    return {
        "layout": dataclasses.asdict(plan.layout)
        | {
            "num_devices": plan.layout.world_size,
            "micro_batch_size": plan.job.micro_batch_size,
            "num_micro_batches": plan.job.num_micro_batches(plan.layout),
            "global_batch_size": plan.job.global_batch_size,
            "seq_length": plan.job.seq_length,
            "dtype": plan.job.dtype,
            "recompute": plan.recompute,
        },
        "parameters": {"model": plan.parameters.total, "rank": plan.parameters.per_rank},
        "teacher": plan.teacher,
        "rank_memory_bytes": {
            mode: dataclasses.asdict(memory) | {"total": memory.total} for mode, memory in plan.memory.items()
        },
        "usable_bytes": plan.cluster.usable_bytes,
        "step_flops": {"model": plan.model_flops, "hardware": plan.hardware_flops},
        "collectives": [dataclasses.asdict(c) | {"total_bytes": c.total_bytes} for c in plan.collectives],
        "step_time_s": dataclasses.asdict(time) | {"total": time.total, "slowest": time.slowest},
        "messages_s": {"latency": time.latency, "transfer": time.messages - time.latency},
        "compute_to_communication": time.ratio,
        "mfu": plan.mfu,
        "tokens_per_s": plan.tokens_per_s,
        "num_steps": plan.job.num_steps,
        "days": plan.days,
        "energy_mwh": plan.energy_mwh,
        "cluster": plan.cluster.name,
        "evidence": {
            "counts": "exact",
            "memory": "counted, within 5 % of tracked tensors",
            "time": plan.cluster.calibration.evidence,
        },
        "expected_error": plan.cluster.calibration.expected_error,
        "notes": notes,
    }


def format_plan(name: str, plan: Plan, notes: list[str]) -> str:
    """A table of one plan, for the terminal."""
    cluster, time = plan.cluster, plan.time
    of_tensor = f" of {(time.tensor + time.tensor_hidden) * 1e3:,.1f} ms"
    of_data = f" of {(time.data + time.data_hidden) * 1e3:,.1f} ms"
    of_host = f" of {(time.host + time.host_hidden) * 1e3:,.1f} ms"
    slower = f", up to {time.slowest * 1e3:,.1f} ms if messages slow the kernels beside them"
    stages = [("messages between stages", time.pipeline, ""), ("idle, waiting for other stages", time.idle, "")]
    stages = stages if plan.layout.pp_size > 1 else []
    rows = (
        ("matrix products", time.matmul, ""),
        ("element-wise work", time.elementwise, ""),
        ("between kernels", time.overhead, ""),
        ("tensor-parallel messages, not hidden", time.tensor, of_tensor),
        *stages,
        ("data-parallel messages, not hidden", time.data, of_data),
        ("optimizer", time.optimizer, ""),
        *([("waiting for the host", time.host, of_host)] if plan.job.on_gpu else []),
        ("step", time.total, slower * (time.slowest > time.total)),
    )
    energy, (unit, days) = "unknown", _fitting(plan.days, _TIMES)
    if plan.energy_mwh is not None:
        energy_unit, mwh = _fitting(plan.energy_mwh, _ENERGIES)
        energy = f"{plan.energy_mwh / mwh:,.3f} {energy_unit}"
    lines = [
        f"{name} on {plan.layout.world_size:,} of {cluster.name} ({cluster.device})",
        f"  {plan.overrides}",
        f"  {plan.job.dtype}, {plan.job.num_micro_batches(plan.layout)} micro-batch(es) per rank and step, "
        f"global batch {plan.job.global_batch_size:,} x {plan.job.seq_length:,} tokens",
        "",
        f"  {'parameters':<32}{plan.parameters.total:>20,}   per rank {plan.parameters.per_rank:,}",
        *(f"  {'teacher: ' + name.replace('_', ' '):<32}{short_number(n):>20}" for name, n in plan.teacher.items()),
        f"  {'FLOPs per step, model':<32}{short_number(plan.model_flops):>20}",
        f"  {'FLOPs per step, hardware':<32}{short_number(plan.hardware_flops):>20}",
        "",
        *_memory_lines(plan),
        "",
        f"  {'collectives per rank and step':<58}{'kind':<15}{'group':>7}{'count':>8}{'MiB each':>11}{'GiB':>10}",
        *(
            f"    {a.phase + ': ' + a.what:<56}{a.kind.replace('_', '-'):<15}{a.group:>7}"
            f"{a.count:>8,}{a.num_bytes / 2**20:>11,.3f}{a.total_bytes / GIB:>10,.3f}"
            for a in plan.collectives
        ),
        *([] if plan.collectives else ["    none: one rank"]),
        "",
        f"  step time ({_evidence(plan)})",
        _expected_error(plan),
        *(f"    {row:<38}{s * 1e3:>12,.1f} ms {s / time.total:>8.1%}{remark}" for row, s, remark in rows),
        "",
        f"  {'R, computing / all messages':<32}{_ratio(plan):>20}   {time.describe_ratio()}",
        f"  {'all messages, hidden or not':<32}{time.messages * 1e3:>17,.1f} ms   "
        f"latency {time.latency * 1e3:,.1f}, bytes {(time.messages - time.latency) * 1e3:,.1f}",
        f"  {'MFU of the dense peak':<32}{plan.mfu:>20.1%}",
        f"  {'tokens/s':<32}{plan.tokens_per_s:>20,.0f}",
        f"  {f'{unit} for {plan.job.num_steps:,} steps':<32}{plan.days / days:>20,.2f}   without validation, "
        "saves and restarts",
        f"  {'energy':<32}{energy:>20}",
        *(f"  note: {note}" for note in notes),
    ]
    return "\n".join(lines)


def _expected_error(plan: Plan) -> str:
    return f"  expected error: {plan.cluster.calibration.expected_error}"


def _ratio(plan: Plan) -> str:
    return "-" if plan.time.ratio is None else f"{plan.time.ratio:.2f}"


def _evidence(plan: Plan) -> str:
    origin = {
        "fitted": "fitted to published step times",
        "measured": "from measurements of such a machine",
        "modelled": "carried over from another machine",
    }
    return f"modelled; constants {origin[plan.cluster.calibration.evidence]}"


def _memory_lines(plan: Plan) -> list[str]:
    """Memory per rank by part, one column per recomputation mode; that of the plan is marked."""
    title = f"memory per rank, GiB ({plan.cluster.usable_bytes / GIB:.1f} usable)"
    estimates = plan.memory.values()
    heads = [mode + ("*" if mode == plan.recompute else "") for mode in plan.memory]
    lines = [f"  {title:<44}" + "".join(f"{head:>12}" for head in heads)]
    scores = "its" if keeps_scores(plan.job) else "no"
    for part in (*_PARTS[:7], *(_PARTS[-3:] if plan.teacher else ()), "total"):
        name = part.replace("_", " ") + f" (attention keeps {scores} scores)" * (part == "activations")
        values = "".join(f"{getattr(estimate, part) / GIB:>12.3f}" for estimate in estimates)
        lines.append(f"    {name:<42}{values}")
    spare = [(plan.cluster.usable_bytes - estimate.total) / GIB for estimate in estimates]
    words = [f"{gib:.1f} spare" if gib >= 0 else f"{-gib:.1f} short" for gib in spare]
    return [*lines, " " * 46 + "".join(f"{word:>12}" for word in words)]


def ranking_to_dict(ranking: Ranking, top: int, notes: list[str]) -> dict:
    """Plain values of a ranking, ready for JSON."""
    return {
        "fitting": [plan_to_dict(plan, []) for plan in ranking.fitting[:top]],
        "num_fitting": len(ranking.fitting),
        "compared": [*_COMPARED, *_varied(ranking)],
        "too_large": [
            {"layout": plan_to_dict(plan, [])["layout"], "missing_bytes": plan.missing_bytes}
            for plan in ranking.too_large
        ],
        "notes": notes,
    }


def _varied(ranking: Ranking) -> list[str]:
    """The options in which layouts that fit differ."""
    return [name for name in _OPTIONS if len({getattr(plan.layout, name) for plan in ranking.fitting}) > 1]


def _fitting(number: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """The largest unit of which there is at least one, or else the last."""
    return next((unit for unit in units if number >= unit[1]), units[-1])


def format_ranking(name: str, ranking: Ranking, top: int, notes: list[str]) -> str:
    """The fastest layouts that fit, and for the others how much memory is missing."""
    first, varied = (ranking.fitting or ranking.too_large)[0], _varied(ranking)
    has_stages = any(plan.layout.pp_size > 1 for plan in ranking.fitting)
    unit, days = _fitting(first.days, _TIMES)
    same = [f"{name}={str(getattr(first.layout, name)).lower()}" for name in _OPTIONS if name not in varied]
    lines = [
        f"{name} on {first.layout.world_size:,} of {first.cluster.name} ({first.cluster.device}), "
        f"{len(ranking.fitting):,} layouts fit; step times {_evidence(first)}",
        f"  compared: {', '.join((*_COMPARED, *varied))}" + f"; the same in all: {', '.join(same)}" * bool(same),
        f"{'':>4}{'tp':>5}{'pp' if has_stages else '':>{5 * has_stages}}{'dp':>7}{'micro':>7}"
        + "".join(f"{_OPTIONS[name]:>8}" for name in varied)
        + f"{'recompute':>11}{'GiB':>9}{'s/step':>13}{'R':>8}{'MFU':>8}"
        f"{'tokens/s':>15}{unit:>13} of {first.job.num_steps:,} steps",
    ]
    for number, plan in enumerate(ranking.fitting[:top], start=1):
        layout = plan.layout
        lines.append(
            f"{number:>4}{layout.tp_size:>5}{layout.pp_size if has_stages else '':>{5 * has_stages}}{layout.dp_size:>7}"
            f"{plan.job.micro_batch_size:>7}"
            + "".join(f"{'yes' if getattr(layout, name) else '':>8}" for name in varied)
            + f"{plan.recompute:>11}{plan.needed_bytes / GIB:>9.1f}"
            f"{plan.time.total:>13,.3f}{_ratio(plan):>8}{plan.mfu:>8.1%}{plan.tokens_per_s:>15,.0f}"
            f"{plan.days / days:>13,.2f}"
        )
    lines.append(_expected_error(first))
    if any((plan.time.ratio or 1) < 1 for plan in ranking.fitting[:top]):
        lines.append("   R below 1: communication-bound")
    waiting = [str(number) for number, plan in enumerate(ranking.fitting[:top], start=1) if plan.time.host]
    if waiting:
        lines.append(f"   host-bound, the devices wait for their hosts: {', '.join(waiting)}")
    for plan in ranking.too_large:
        lines.append(
            f"   refused: tp {plan.layout.tp_size}{f' x pp {plan.layout.pp_size}' if has_stages else ''} x dp "
            f"{plan.layout.dp_size} needs at least "
            f"{plan.needed_bytes / GIB:.1f} GiB per rank, {plan.missing_bytes / GIB:.1f} more than the "
            f"{plan.cluster.usable_bytes / GIB:.1f} there are ({plan.overrides})"
        )
    if ranking.fitting:
        lines.append(f"best: {ranking.fitting[0].overrides}")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def slowest_first(rows: list[StepRow]) -> list[StepRow]:
    """Rows with those of equal name and phase added up, slowest first."""
    found: dict[tuple[str, str], list[StepRow]] = defaultdict(list)
    for row in rows:
        found[row.name, row.phase].append(row)
    return sorted(map(_add, found.values()), key=lambda row: -row.seconds)


def _add(rows: list[StepRow]) -> StepRow:
    """The first row with the numbers of all."""
    return dataclasses.replace(rows[0], **{name: sum(getattr(row, name) for row in rows) for name in _ADDED})


def format_operations(rows: list[StepRow]) -> str:
    """A table of rows for the terminal, with their sum."""
    heads = f"{'count':>7}{'launches':>10}{'GFLOP':>12}{'GB read':>9}{'written':>9}{'ms':>10}{'share':>8}"
    lines = [f"  {'operations of one rank and step, modelled':<64}{heads}  bound by"]
    total = dataclasses.replace(_add(rows), hidden=0.0)
    named = [(f"{row.phase}: {row.name}", row, row.bound) for row in rows]
    for name, row, bound in [*named, ("sum", total, "")]:
        hidden = f" of {(row.seconds + row.hidden) * 1e3:,.2f} ms" if row.hidden > 1e-9 else ""
        lines.append(
            f"    {name:<62}{row.count:>7,}{row.launches:>10,}{row.flops / 1e9:>12,.1f}{row.read / 1e9:>9,.2f}"
            f"{row.written / 1e9:>9,.2f}{row.seconds * 1e3:>10,.2f}{row.seconds / total.seconds:>8.1%}  {bound}{hidden}"
        )
    return "\n".join(lines)


def short_number(value: float) -> str:
    """Four digits and a prefix: 1.234 P."""
    value = float(f"{value:.4g}")  # 999,999 is 1 M
    for size, prefix in _UNITS:
        if value >= size:
            return f"{value / size:,.4g} {prefix}" if value < 1000 * size else f"{value / size:,.0f} {prefix}"
    return f"{value:,.4g}"
