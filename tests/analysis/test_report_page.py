"""The report in a browser: its cost model is the planner's, its colours are legible, and nothing overflows."""

import json
import re
import shutil
import subprocess

import pytest

from analysis.report import make_report, make_tables
from analysis.report.records import fitted_cluster, read_records
from analysis.scaling.study import CELLS, SIZES, predict_cell, study_model, study_time
from lmscale.paper import SEQ_LENGTH
from lmscale.planner.flops import hardware_flops_per_step
from lmscale.planner.memory import estimate_memory
from lmscale.planner.params import count_parameters

# Layers, hidden size, tensor ranks, data ranks, sequences: those of Figure 5, and some of none.
CHOICES = [
    (40, 1536, 1, 1, 8),
    (54, 1920, 2, 64, 8),
    (64, 2304, 4, 64, 8),
    (72, 3072, 8, 1, 8),
    (72, 3072, 8, 64, 8),
    (96, 6144, 16, 8, 1),
    (8, 768, 2, 2, 3),
    (24, 1536, 16, 1, 32),
]


@pytest.fixture(scope="module")
def cluster():
    return fitted_cluster(read_records(make_tables.ANALYSIS)["cost_model.json"])


@pytest.fixture(scope="module")
def computed(cluster) -> list[dict]:
    """What the page computes for the choices, evaluated by Node."""
    if shutil.which("node") is None:
        pytest.skip("needs Node.js to evaluate the page's cost model")
    names = ("layers", "hidden", "tp", "dp", "batch")
    choices = [dict(zip(names, choice, strict=True)) for choice in [*CHOICES, (54, 1920, 8, 1, 8)]]
    asked = json.dumps([choices, make_report.cluster_rates(cluster)])
    code = (
        make_report.COST_MODEL.read_text(encoding="utf-8")
        + f"""
    const [choices, cluster] = {asked};
    const answer = c => ({{...costModel(c, cluster), efficiency: linearScaling(c, cluster)}});
    console.log(JSON.stringify([...choices.slice(0, -1).map(answer), costModel(choices.at(-1), cluster)]));"""
    )
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_the_pages_cost_model_is_the_planners(cluster, computed) -> None:
    for (num_layers, hidden_size, tp_size, dp_size, batch), found in zip(CHOICES, computed, strict=False):
        config = study_model(num_layers, hidden_size, hidden_size // 96)
        time = study_time(config, tp_size, dp_size, cluster, batch)
        parts = {name: getattr(time, name) for name in found["seconds"]}
        assert found["seconds"] == pytest.approx(parts, rel=1e-12) and found["total"] == pytest.approx(time.total)
        memory = estimate_memory(config, tp_size, batch, SEQ_LENGTH, "fp16", dp_size)
        kept = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer_state}
        assert found["bytes"] == kept | {"activations": memory.activations} and found["peak"] == memory.total
        assert found["parameters"] == count_parameters(config).total
        num_gpus = tp_size * dp_size
        flops = hardware_flops_per_step(config, SEQ_LENGTH, dp_size * batch) / num_gpus
        assert found["flopsPerGpu"] == pytest.approx(flops / time.total, rel=1e-12)


def test_the_pages_efficiency_is_figure_5s(cluster, computed) -> None:
    cells = [cell for cell in CELLS if cell.table == "Figure 5"]
    places = {(SIZES[cell.size][0], cell.tp_size, cell.dp_size): cell for cell in cells}
    compared = 0
    for (num_layers, _, tp_size, dp_size, _), found in zip(CHOICES, computed, strict=False):
        if cell := places.get((num_layers, tp_size, dp_size)):
            assert found["efficiency"] == pytest.approx(predict_cell(cell, cluster), rel=1e-12)
            compared += 1
    assert compared == 4


def test_heads_that_do_not_divide_are_refused(computed) -> None:
    assert computed[-1]["error"] == "20 attention heads do not divide over 8 tensor ranks"


def palettes() -> dict[str, dict[str, str]]:
    """Colours by name, of the light and the dark mode."""
    style = make_report.TEMPLATE.read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    )
    assert light.keys() == dark.keys()
    return {"light": light, "dark": dark}


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours as defined by WCAG 2.1."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_has_a_contrast_of_at_least_4_5_and_marks_of_3(mode) -> None:
    colours = palettes()[mode]
    chips = [(name, name.removesuffix("-ink")) for name in colours if name.endswith("-ink")]
    text = [(ink, ground) for ink in ("ink", "soft", "link") for ground in ("paper", "back", "head")]
    marks = [(mark, "paper") for mark in ("blue", "orange", "green", "pink", "grey", "brown", "field")]
    assert len(chips) == 5
    for pairs, least in ((text + chips, 4.5), (marks, 3.0)):
        ratios = {pair: contrast(*(colours[name] for name in pair)) for pair in pairs}
        assert {pair: ratio for pair, ratio in ratios.items() if ratio < least} == {}


PROBE = """<script>addEventListener("load", () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  const inputs = [...document.querySelectorAll("input, button, .fold > summary")];
  const focused = inputs.filter(input => { input.focus(); return document.activeElement === input; });
  const step = () => document.querySelector("[data-out=step]").textContent, before = step();
  const tensor = document.querySelector("input[name=tp]");
  tensor.value = 0;
  tensor.dispatchEvent(new Event("input", {bubbles: true}));
  parent.postMessage(JSON.stringify({width: innerWidth, scroll: document.documentElement.scrollWidth,
    inputs: inputs.length, focused: focused.length, before, after: step()}), "*");
});</script></body>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_in_chromium_nothing_overflows_and_every_control_takes_the_focus(tmp_path, width) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    page = make_report.render(make_tables.ANALYSIS).replace("</body>", PROBE)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (tmp_path / "frame.html").write_text(
        f'<iframe src="page.html" width="{width}" height="900" style="border:0"></iframe><pre></pre><script>'
        'addEventListener("message", event => document.querySelector("pre").textContent = event.data)</script>'
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--window-size=1400,1000", "--dump-dom", str(tmp_path / "frame.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(re.search(r"<pre>(.*?)</pre>", done.stdout, re.S)[1])
    assert found["width"] == width and found["scroll"] <= width
    assert found["inputs"] == found["focused"] > 15
    assert found["before"] != found["after"]
