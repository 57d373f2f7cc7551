"""Figures of the coordinate check: the moves of one check, and the verdicts of all that are recorded."""

import seaborn as sns
from matplotlib.figure import Figure

from analysis.report.style import BLUE, GREY, ORANGE, house_style, page_figure

COLORS = {"standard": GREY, "mup": ORANGE, "completep": BLUE}


def draw_moves(rows: list[dict], bound: float, title: str) -> Figure:
    """A panel per axis of `run.check`'s rows, a line per part, with the verdict on each."""
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    with house_style():
        figure = page_figure(title, 4.2)
        for panel, axis in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
            for row in (row for row in rows if row["axis"] == axis):
                label = f"{row['part']}: {row['power']:+.2f} {'pass' if abs(row['power']) <= bound else 'FAIL'}"
                panel.loglog(row["sizes"], row["moves"], marker="o", label=label)
            panel.set(xlabel=axis, ylabel="mean |x after - x before|")
            panel.set_xticks(row["sizes"], row["sizes"])
            panel.minorticks_off()
            panel.legend(title="power of the size", fontsize="small")
    return figure


def draw_powers(records: list[dict]) -> Figure:
    """The power of every part in every recorded check, a row per family and a panel per axis; the band passes."""
    configs = [record["config"] for record in records]
    families = sorted({config["model"]["architecture"] for config in configs}, reverse=True)
    axes = list(dict.fromkeys(row["axis"] for config in configs for row in config["rows"]))
    with house_style():
        title = "muP moves all parts equally far at every width, CompleteP at every depth too; standard does neither"
        figure = page_figure(title, 2.6 * len(families))
        panels = figure.subplots(len(families), len(axes), sharex=True, sharey="row", squeeze=False)
        for family, line in zip(families, panels, strict=True):
            for axis, panel in zip(axes, line, strict=True):
                bound = configs[0]["bound"]
                panel.axvspan(-bound, bound, color="0.93", zorder=0)
                for config in (config for config in configs if config["model"]["architecture"] == family):
                    rows = [row for row in config["rows"] if row["axis"] == axis]
                    name = config["model"]["parametrization"]
                    fails = sum(abs(row["power"]) > bound for row in rows)
                    label = f"{name}: {f'{fails} of {len(rows)} FAIL' if fails else 'all pass'}"
                    if rows:
                        powers, parts = [row["power"] for row in rows], [row["part"] for row in rows]
                        panel.scatter(powers, parts, color=COLORS[name], s=18, label=label)
                panel.set_title(f"{family.upper()}, {axis}", loc="left")
                panel.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14))
        figure.supxlabel("power of the size by which the mean |x after - x before| changes", fontsize="medium")
        sns.despine(figure)
    return figure
