// The cost model of lmscale.planner for the paper's GPTs: fp16, exact attention, full recomputation, 1,024 tokens,
// heads of 96. tests/analysis/test_report_page.py compares every number with the planner's.
"use strict";
const SEQUENCE = 1024, VOCABULARY = 51200, HEAD = 96, TILE = 128, HALF = 2, FP32 = 4;

// choice: layers, hidden, tp, dp, batch (sequences per data rank and step); cluster: rates of `conf/cluster`.
function costModel(choice, cluster) {
  const {layers: L, hidden: h, tp: p, dp, batch: b} = choice;
  const s = SEQUENCE, V = VOCABULARY, n = h / HEAD, tokens = b * s;
  if (n % p) return {error: n + " attention heads do not divide over " + p + " tensor ranks"};
  const sharded = V * h + L * (12 * h * h + 7 * h), replicated = s * h + L * 6 * h + 2 * h;
  const perRank = sharded / p + replicated;

  // Seconds of a step, in the paper's code of 2019
  const tiles = width => Math.ceil(Math.floor(width) / TILE) * TILE;
  const linears = 2 * tokens * h * (tiles(3 * h / p) + tiles(h / p) + 2 * tiles(4 * h / p));
  const scores = 4 * b * s * s * (h / p) * (1 + 64 / HEAD);
  const products = 4 * L * (linears + scores) + 6 * tokens * h * tiles(V / p);
  const passes = L * (30 * b * n * s * s / p + 42 * tokens * h + 52 * tokens * h / p) + 15 * tokens * V / p;
  const memoryRate = 0.85 * cluster.memory_bandwidth_gb_s * 1e9;
  const allReduce = (bytes, ranks, span) => {
    const rate = span <= cluster.devices_per_node ? cluster.tensor_bandwidth_gb_s : cluster.data_bandwidth_gb_s;
    return ranks === 1 ? 0 : 2 * (ranks - 1) / ranks * bytes / (rate * 1e9) + cluster.latency_us * 1e-6;
  };
  const rows = Math.floor(50 * 2 ** 20 / (V / p)), rest = tokens % rows;
  const ofLoss = Math.floor(tokens / rows) * allReduce(FP32 * rows, p, p) + (rest && allReduce(FP32 * rest, p, p));
  const seconds = {
    matmul: products / (cluster.peak_fp16_tflops * 1e12 * cluster.matmul_share),
    elementwise: cluster.elementwise_factor * HALF * passes / memoryRate,
    overhead: L * cluster.layer_overhead_ms * 1e-3,
    tensor: (6 * L + 2) * allReduce(HALF * tokens * h, p, p) + 3 * ofLoss,
    data: allReduce(HALF * perRank, dp, p * dp),
    optimizer: 48 * perRank / memoryRate,
  };
  const total = Object.values(seconds).reduce((a, c) => a + c);
  const flopsPerGpu = tokens * (4 * L * (24 * h * h + 4 * s * h) + 6 * h * V) / total / p;

  // Bytes of a rank, in this project's code
  const core = 7 * b * n * s * s / p, own = tokens * h;
  const layer = 10 * own + 24 * own / p + core, columns = V / p, atOnce = Math.floor(200 * 2 ** 20 / columns);
  const piece = Math.min(tokens, atOnce) * columns;
  const logits = (tokens > atOnce ? 4 * columns * h : 0) + Math.max(6 * piece, 2 * piece + 2 * columns * h);
  const freed = 5 * own + 16 * own / p;
  const inFlight = Math.max(8 * own / p, Math.floor(12.4 * b * n * s * s / p) - freed);
  const bytes = {
    weights: HALF * perRank, gradients: FP32 * perRank, optimizer: 12 * perRank,
    activations: 5 * own + L * 2 * own,
  };
  const lastLayer = 2 * columns * h + layer - 2 * own + inFlight;
  const atEnd = bytes.activations + Math.max(logits, lastLayer), atStart = 2 * columns * h + layer + own + inFlight;
  const peak = bytes.weights + bytes.gradients + bytes.optimizer + Math.max(atEnd, atStart);
  return {parameters: sharded + replicated, gpus: p * dp, seconds, total, bytes, peak, flopsPerGpu};
}

// Parameters times sequences per second and GPU, in percent of the 1.2 B model on one GPU: the paper's linear scaling.
function linearScaling(choice, cluster) {
  const rate = c => { const r = costModel(c, cluster); return r.parameters * c.batch * c.dp / (r.total * r.gpus); };
  return 100 * rate(choice) / rate({layers: 40, hidden: 1536, tp: 1, dp: 1, batch: 8});
}

// The sliders of the report: read the inputs of `form`, compute, write the outputs and the two bars.
function startSliders(form, cluster) {
  const field = name => form.elements[name];
  const powers = ["tp", "dp"];
  const read = () => {
    const choice = {};
    for (const name of ["layers", "hidden", "tp", "dp", "batch", "bandwidth"]) {
      const value = Number(field(name).value);
      choice[name] = powers.includes(name) ? 2 ** value : value;
    }
    return choice;
  };
  const write = (name, text) => { form.querySelector("[data-out=" + name + "]").textContent = text; };
  const bar = (name, parts, whole, unit) => {
    const shown = Object.entries(parts).filter(([, value]) => value > 0);
    form.querySelector("[data-bar=" + name + "]").replaceChildren(...shown.map(([part, value]) => {
      const piece = document.createElement("span");
      piece.className = "part " + part;
      piece.style.flexGrow = value / whole;
      return piece;
    }));
    form.querySelector("[data-key=" + name + "]").replaceChildren(...shown.map(([part, value]) => {
      const line = document.createElement("li");
      line.className = part;
      line.textContent = part + " " + value.toPrecision(3) + " " + unit;
      return line;
    }));
  };
  const show = () => {
    const choice = read(), rates = {...cluster, tensor_bandwidth_gb_s: choice.bandwidth};
    for (const input of form.querySelectorAll("input")) input.nextElementSibling.textContent =
      powers.includes(input.name) ? 2 ** input.value : Number(input.value).toLocaleString("en");
    const found = costModel(choice, rates);
    form.querySelector(".answer").hidden = Boolean(found.error);
    write("error", found.error || "");
    if (found.error) return;
    const gib = value => value / 2 ** 30, limit = cluster.memory_gib - cluster.reserved_gib;
    write("model", (found.parameters / 1e9).toPrecision(3) + " B parameters, " + choice.hidden / HEAD + " heads, "
      + found.gpus + (found.gpus > 1 ? " GPUs" : " GPU"));
    write("step", found.total.toPrecision(3) + " s");
    write("memory", gib(found.peak).toPrecision(3) + " GiB");
    write("fits", (gib(found.peak) > limit ? "more than the " : "fits in ") + limit + " GiB");
    write("scaling", linearScaling(choice, rates).toFixed(1) + " %");
    write("rate", (found.flopsPerGpu / 1e12).toPrecision(3));
    bar("step", found.seconds, found.total, "s");
    const named = Object.entries(found.bytes).map(([part, value]) => [part, gib(value)]);
    const rest = gib(found.peak) - named.reduce((sum, [, value]) => sum + value, 0);
    bar("memory", {...Object.fromEntries(named), temporary: rest}, gib(found.peak), "GiB");
  };
  form.addEventListener("input", show);
  form.addEventListener("click", event => {
    if (!event.target.dataset.choice) return;
    const choice = JSON.parse(event.target.dataset.choice);
    for (const [name, value] of Object.entries(choice)) {
      field(name).value = powers.includes(name) ? Math.log2(value) : value;
    }
    field("bandwidth").value = cluster.tensor_bandwidth_gb_s;
    show();
  });
  show();
}
