"""The operations of a planned step, slowest first: `python src/plan.py operations=true`."""

from dataclasses import dataclass

from .operations import step_operations
from .plan import Plan
from .roofline import launch_s, operation_s
from .step_time import collective_s, exposed_s


@dataclass(frozen=True)
class Row:
    """One operation of one rank and step.

    Args:
        count, launches: per step.
        flops, read, written: of all of them together.
        seconds: of all, launches included; of messages only what nothing hides.
        bound: what its time is: `products`, `bytes`, `launches` or `messages`.
        hidden: seconds of messages behind computation.
    """

    name: str
    phase: str
    count: int
    launches: int
    flops: int
    read: int
    written: int
    seconds: float
    bound: str
    hidden: float = 0.0


def operation_rows(plan: Plan) -> list[Row]:
    """Every operation of a step on a cluster with a roofline, slowest first; rows of one name and phase are added."""
    cluster, job, rows = plan.cluster, plan.job, []
    counted = plan.layout, job.micro_batch_size, plan.num_micro_batches, job.seq_length, job.dtype, job.half_moments
    for o in step_operations(job.config, *counted):
        seconds, gaps = operation_s(o, cluster, job.dtype), launch_s(o, cluster)
        bound = "launches" if gaps > seconds else "products" if o.flops else "bytes"
        totals = (o.count, o.count * o.launches, o.count * o.flops, o.count * o.read, o.count * o.written)
        rows.append(Row(o.name, o.phase, *totals, seconds + gaps, bound))
    run = job.config, plan.layout, job.micro_batch_size, job.seq_length, job.dtype, cluster
    begun = set()
    for c, seconds in zip(plan.collectives, exposed_s(plan.collectives, *run), strict=True):
        hidden = collective_s(c, plan.layout, cluster) - seconds
        if c.group == "data":  # one latency for all pieces of a sum, as in `predict_step_time`
            seconds -= (c.count - (c.what not in begun)) * cluster.latency_us * 1e-6
            begun.add(c.what)
        rows.append(
            Row(c.what, c.phase, c.count, c.count, 0, c.total_bytes, c.total_bytes, seconds, "messages", hidden)
        )
    return sorted(_merged(rows), key=lambda row: -row.seconds)


def _merged(rows: list[Row]) -> list[Row]:
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key, before = (row.name, row.phase), found.get((row.name, row.phase))
        if before is not None:
            added = (getattr(row, name) + getattr(before, name) for name in ("count", "launches", "flops"))
            moved = (row.read + before.read, row.written + before.written, row.seconds + before.seconds)
            row = Row(*key, *added, *moved, before.bound, row.hidden + before.hidden)
        found[key] = row
    return list(found.values())


def format_operations(rows: list[Row]) -> str:
    """A table for the terminal, with the sum of the rows."""
    total = sum(row.seconds for row in rows)
    title = "operations of one rank and step, modelled"
    heads = f"{'count':>7}{'launches':>10}{'GFLOP':>12}{'GB read':>9}{'written':>9}{'ms':>10}{'share':>8}  bound by"
    lines = [f"  {title:<64}{heads}"]
    summed = Row(
        "sum",
        "",
        *(sum(getattr(row, name) for row in rows) for name in ("count", "launches", "flops", "read", "written")),
        total,
        "",
    )
    for row in (*rows, summed):
        name = f"{row.phase}: {row.name}" if row.phase else row.name
        bound = row.bound + (f" of {(row.seconds + row.hidden) * 1e3:,.2f} ms" if row.hidden > 1e-9 else "")
        lines.append(
            f"    {name:<62}{row.count:>7,}{row.launches:>10,}{row.flops / 1e9:>12,.1f}{row.read / 1e9:>9,.2f}"
            f"{row.written / 1e9:>9,.2f}{row.seconds * 1e3:>10,.2f}{row.seconds / total:>8.1%}  {bound}"
        )
    return "\n".join(lines)
