"""The guide shows the numbers of the committed record of measured layouts."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "analysis" / "scaling" / "records" / "measured_layouts_cpu.json"


def test_the_guide_shows_the_committed_record() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows, metrics = record["config"]["rows"], record["metrics"]
    page = " ".join((ROOT / "docs" / "guides" / "plan.md").read_text(encoding="utf-8").split())
    for row in rows:
        times = " | ".join(f"{row[name]:.3f}" for name in ("short_s", "long_s", "modelled_s"))
        memory = " | ".join(f"{row[name] / 2**30:.2f}" for name in ("bytes", "modelled_bytes"))
        assert f"| `{row['layout']}` | {row['threads_per_rank']} | {times} | {memory} |" in page
    fastest = [min(rows, key=lambda row: row[f"{name}_s"])["layout"] for name in ("long", "short", "modelled")]
    assert fastest == ["tp1_dp1"] * 3
    in_order = {name: metrics[f"{name}/pairs_in_order"]["value"] for name in ("short", "modelled")}
    worst = {name: metrics[f"{name}/largest_difference"]["value"] for name in ("short", "modelled")}
    reversed_pair = metrics["tp2_dp1/long_s"]["value"] / metrics["tp1_dp2_zero1/long_s"]["value"] - 1
    excess = [row["bytes"] / row["modelled_bytes"] - 1 for row in rows]
    assert worst["modelled"] < 0  # too low
    for said in (
        f"The load average before it was {metrics['load_average_before']['value']:.1f}, so other processes",
        f"are within {abs(worst['short']):.1%} of the long ones",
        f"They order {in_order['short']} of the 6 pairs alike; the other pair differs by {reversed_pair:.1%} in",
        f"orders only {in_order['modelled']} of them alike, and its times are up to {-worst['modelled']:.1%} too low",
        f"{100 * min(excess):.0f} to {max(excess):.0%} above the model",
    ):
        assert said.replace("%", " %") in page
