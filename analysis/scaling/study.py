"""The paper's scaling study as data, and the cost model's prediction of each cell.

The time model is the planner's: products and messages are counted as for this project's code, and everything else from
the paper's own code of 2019, whose kernels were not fused.

Percentages are of linear scaling in our reading of the paper: parameters per second and GPU, relative to the 1.2 B
model on one GPU, (N_n / N_1) / n x t_1 / t_n. The paper's baseline of 39 TFLOP/s, 30 % of the peak, anchors the cost
model.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache

from scipy import optimize

from analysis.ledger.entries import PAPER, paper_shape
from lmscale.config import Layout, TransformerConfig
from lmscale.config.cluster import Cluster
from lmscale.paper import GPT_VOCABULARY, SEQ_LENGTH
from lmscale.planner.communication import Collective, micro_batch_collectives
from lmscale.planner.flops import TERA, hardware_flops_per_step
from lmscale.planner.operation import Operation
from lmscale.planner.params import count_parameters
from lmscale.planner.step_operations import step_operations
from lmscale.planner.step_time import StepTime, message_rows, operation_rows
from lmscale.planner.workload import HALF_BYTES, Workload

MICRO_BATCH = PAPER["section_5.1/mp_batch"]  # sequences per data rank
DATA_RANKS = PAPER["section_5.1/data_ranks"]  # of every data-parallel GPT
BASELINE_FLOPS_PER_S = PAPER["section_5.1/baseline"] * TERA  # hardware FLOPs of the 1.2 B model on one V100
PETAFLOPS_512 = PAPER["figure_1/mp_dp/512_gpus"]  # sustained on 512 GPUs
ITERATIONS_PER_EPOCH, VALIDATE_EVERY, VALIDATION_BATCHES = PAPER["section_5.2/epoch"], 1000, 100
# Passes of the paper's code over a tensor of one layer, read or written, with full recomputation; not fitted.
SCORE_PASSES = 2 * 9 + 12  # [b, n/p, s, s]: scale, mask, softmax, dropout
WHOLE_PASSES = 2 * 12 + 18  # [b, s, h] on every rank: LayerNorms, biases, dropouts, residuals
SPLIT_PASSES = 2 * 16 + 20  # [b, s, h/p]: the GELU's four h, biases, heads moved to the front and back
LOGIT_PASSES = 15  # [b, s, v/p], a pass in fp32 counted as two
LAUNCHES_OF_A_LAYER = 200  # assumed
OPTIMIZER_BYTES = 48  # per parameter: gradient 6, norm 4, unscaled and clipped 8, state and master 28, weight 2
# Table 1: tensor-parallel size by model; with data parallelism, `DATA_RANKS` times as many GPUs.
STUDY_TP_SIZES = {size: PAPER[f"table_1/gpt_{size.lower()}/mp_gpus"] for size in ("1.2B", "2.5B", "4.2B", "8.3B")}
# Layers, hidden size, heads of Tables 1 and 2; the 8.3 B of Table 2 has 24 heads, that of Table 1 has 32.
SIZES = {"355M": paper_shape("table_2/gpt_355m")} | {n: paper_shape(f"table_1/gpt_{n.lower()}") for n in STUDY_TP_SIZES}


@dataclass(frozen=True)
class Cell:
    """One published figure of the study.

    Args:
        table: table or figure of the paper.
        label: name of the cell.
        size: key of `SIZES`.
        heads: attention heads.
        tp_size, dp_size: layout; 8 sequences per data rank.
        entry: the id of the paper's value.
        certainty: `text` if the paper prints the value, `figure` if it was read off Figure 5.
        role: `fit`, `held out`, or `outlier` (held out, and reported apart: see the comment at the cell).
    """

    table: str
    label: str
    size: str
    heads: int
    tp_size: int
    dp_size: int
    entry: str
    certainty: str
    role: str

    @property
    def paper(self) -> float:
        """The paper's % of linear scaling, for which Table 8 prints speed-ups; of Table 2 the days per epoch."""
        value = PAPER[self.entry]
        return 100 * value / self.tp_size if self.table == "Table 8" else value

    @property
    def config(self) -> TransformerConfig:
        """The model."""
        num_layers, hidden_size, _ = SIZES[self.size]
        return study_model(num_layers, hidden_size, self.heads)

    @property
    def layout(self) -> Layout:
        """The grid of ranks."""
        return Layout(tp_size=self.tp_size, dp_size=self.dp_size)


CELLS = (
    Cell("Figure 5", "MP, 2 GPUs", "2.5B", 20, 2, 1, "figure_5/mp/2_gpus", "figure", "held out"),
    Cell("Figure 5", "MP, 4 GPUs", "4.2B", 24, 4, 1, "figure_5/mp/4_gpus", "figure", "fit"),
    Cell("Figure 5", "MP, 8 GPUs", "8.3B", 32, 8, 1, "figure_5/mp/8_gpus", "text", "held out"),
    Cell("Figure 5", "MP+DP, 64 GPUs", "1.2B", 16, 1, 64, "figure_5/mp_dp/64_gpus", "figure", "fit"),
    # 64-way data parallelism costs 12 points at this size (95 to 83), but only 4, 3 and 3 at the others.
    Cell("Figure 5", "MP+DP, 128 GPUs", "2.5B", 20, 2, 64, "figure_5/mp_dp/128_gpus", "figure", "outlier"),
    Cell("Figure 5", "MP+DP, 256 GPUs", "4.2B", 24, 4, 64, "figure_5/mp_dp/256_gpus", "figure", "held out"),
    Cell("Figure 5", "MP+DP, 512 GPUs", "8.3B", 32, 8, 64, "figure_5/mp_dp/512_gpus", "text", "fit"),
    Cell("Table 7", "16 heads", "8.3B", 16, 8, 1, "table_7/gpt_8.3b/16_heads", "text", "fit"),
    Cell("Table 7", "24 heads", "8.3B", 24, 8, 1, "table_7/gpt_8.3b/24_heads", "text", "held out"),
    Cell("Table 7", "32 heads", "8.3B", 32, 8, 1, "table_7/gpt_8.3b/32_heads", "text", "held out"),
    Cell("Table 8", "2 GPUs", "1.2B", 16, 2, 1, "table_8/gpt_1.2b/2_gpus", "text", "fit"),
    Cell("Table 8", "4 GPUs", "1.2B", 16, 4, 1, "table_8/gpt_1.2b/4_gpus", "text", "held out"),
    Cell("Table 8", "8 GPUs", "1.2B", 16, 8, 1, "table_8/gpt_1.2b/8_gpus", "text", "fit"),
)
LARGEST_CELL = next(cell for cell in CELLS if cell.tp_size * cell.dp_size == 512)
TRAINING_DAYS = (
    Cell("Table 2", "355M", "355M", 16, 1, 64, "table_2/gpt_355m/days", "text", "held out"),
    Cell("Table 2", "2.5B", "2.5B", 20, 2, 64, "table_2/gpt_2.5b/days", "text", "held out"),
    Cell("Table 2", "8.3B", "8.3B", 24, 8, 64, "table_2/gpt_8.3b_24heads/days", "text", "held out"),
)


@dataclass(frozen=True)
class LaterShape:
    """A row of the tables published with Megatron-LM in September 2020 (faster code, other shapes).

    Args:
        v100_ms, a100_ms: milliseconds per step on DGX-2 with 8 sequences, on DGX A100 with 16.
        v100, a100: % of linear scaling, as printed.
        a100_128_way: % of linear scaling with 128 data ranks.
    """

    num_layers: int
    hidden_size: int
    heads: int
    tp_size: int
    v100_ms: float
    a100_ms: float
    v100: float
    a100: float
    a100_128_way: float

    @property
    def config(self) -> TransformerConfig:
        """The model."""
        return study_model(self.num_layers, self.hidden_size, self.heads)


LATER_SHAPES = (
    LaterShape(24, 1920, 15, 1, 1121, 1076, 100.0, 100.0, 93.3),
    LaterShape(30, 2304, 18, 2, 1093, 1026, 89.6, 91.7, 85.5),
    LaterShape(36, 3072, 24, 4, 1238, 1162, 82.5, 84.5, 79.0),
    LaterShape(42, 4096, 32, 8, 1407, 1343, 74.3, 74.7, 72.7),
)


def study_model(num_layers: int, hidden_size: int, heads: int) -> TransformerConfig:
    """A GPT of the study, with full recomputation and exact attention."""
    sizes = num_layers, hidden_size, heads, GPT_VOCABULARY, SEQ_LENGTH
    return TransformerConfig("gpt", *sizes, recompute="full", attention="exact")


def baseline() -> tuple[TransformerConfig, float]:
    """The 1.2 B model and its seconds per step of 8 sequences on one V100, from the printed 39 TFLOP/s."""
    config = study_model(*SIZES["1.2B"])
    return config, hardware_flops_per_step(config, SEQ_LENGTH, MICRO_BATCH) / BASELINE_FLOPS_PER_S


@cache
def _paper_work(
    job: Workload, layout: Layout, code_share: float
) -> tuple[list[Operation], list[Operation], list[Collective]]:
    """Products, passes of the paper's code and messages of the tensor group, of one step of one rank."""
    config, tp_size, whole = job.config, layout.tp_size, job.tokens * job.config.hidden_size
    products = [o for o in step_operations(job, layout) if o.kind == "product"]
    scores = job.tokens * job.seq_length * config.num_attention_heads // tp_size
    layer = SCORE_PASSES * scores + WHOLE_PASSES * whole + SPLIT_PASSES * whole // tp_size
    logits = LOGIT_PASSES * job.tokens * config.padded_vocab_size // tp_size
    num_bytes = code_share * HALF_BYTES * (config.num_layers * layer + logits)
    launches = code_share * LAUNCHES_OF_A_LAYER * config.num_layers
    optimizer_bytes = OPTIMIZER_BYTES * count_parameters(config, layout).per_rank
    passes = [
        Operation("passes", "all", num_bytes, 0, launches),
        Operation("Adam", "optimizer", optimizer_bytes, 0),
    ]
    return products, passes, micro_batch_collectives(job, layout)


def study_time(
    config: TransformerConfig,
    layout: Layout,
    cluster: Cluster,
    micro_batch_size: int = MICRO_BATCH,
    code_share: float = 1.0,
) -> StepTime:
    """Seconds per step of the study: one micro-batch per data rank, fp16; nothing hides messages.

    Args:
        code_share: passes and launches over those of the paper's code.
    """
    job = Workload(config, micro_batch_size, micro_batch_size, SEQ_LENGTH, "fp16")
    products, passes, messages = _paper_work(job, dataclasses.replace(layout, dp_size=1), code_share)
    if layout.dp_size > 1:  # the paper sums gradients in fp16
        num_bytes = HALF_BYTES * count_parameters(config, layout).per_rank
        messages = [*messages, Collective("gradients", "all_reduce", "data", "gradients", 1, num_bytes)]
    rows = operation_rows([*products, *passes], cluster, "fp16")
    return StepTime.of([*rows, *message_rows(messages, layout, cluster)])


def anchor(cluster: Cluster) -> Cluster:
    """Set the product rate of `cluster` such that the baseline takes the time given by the paper.

    Raises:
        ValueError: everything except matrix products already takes longer.
    """
    config, seconds = baseline()
    for _ in range(20):  # products that are bound by their bytes make it take more than one
        time = study_time(config, Layout(), cluster)
        left = seconds - (time.total - time.matmul)
        if not left > 0:
            raise ValueError(
                f"the baseline must leave time for matrix products, but everything else takes {seconds - left:.3f} s"
            )
        cluster = with_rates(cluster, product_share=cluster.roofline.product_share * time.matmul / left)
        if abs(time.total / seconds - 1) < 1e-12:
            break
    return cluster


def predict_cell(cell: Cell, cluster: Cluster) -> float:
    """The cell's % of linear scaling on an anchored cluster."""
    first, seconds = baseline()[0], study_time(cell.config, cell.layout, cluster).total
    return efficiency(cell.config, cell.tp_size, seconds, first, study_time(first, Layout(), cluster).total)


def predict_petaflops(cluster: Cluster, cell: Cell = LARGEST_CELL) -> float:
    """Sustained PFLOP/s (hardware FLOPs) of a cell; for the 8.3 B model on 512 GPUs the paper reports 15.1."""
    seconds = study_time(cell.config, cell.layout, cluster).total
    return hardware_flops_per_step(cell.config, SEQ_LENGTH, MICRO_BATCH * cell.dp_size) / seconds / 1e15


def predict_days(cell: Cell, cluster: Cluster) -> tuple[float, float]:
    """Days per epoch of a cell of Table 2: of the optimizer steps alone, and with validation as in the released code.

    Megatron-LM's defaults validate 100 batches every 1,000 steps. A forward pass has a quarter of a step's compute and
    a third of its tensor-parallel all-reduces (2 of 6 per layer).

    Source: NVIDIA/Megatron-LM, arguments.py of 2019, `--eval-interval` and `--eval-iters`.
    """
    time = study_time(cell.config, cell.layout, cluster)
    forward = time.compute / 4 + time.tensor / 3
    steps = ITERATIONS_PER_EPOCH * time.total / 86400
    return steps, steps + ITERATIONS_PER_EPOCH * VALIDATION_BATCHES / VALIDATE_EVERY * forward / 86400


def predict_later(cluster: Cluster, first_ms: float, micro_batch_size: int, dp_size: int = 1) -> tuple[float, list]:
    """Predict the table of 2020 from its one-GPU time alone, by the share of the passes and launches that are left.

    The code had become faster: the share is the one at which the first row takes `first_ms`. The machine's rates are
    unchanged.

    Args:
        cluster: the anchored V100 cluster, or one with its shares (`scaled_to`).
        dp_size: data ranks of every row; the first row's time is always that of one GPU.

    Returns:
        the share, and the % of linear scaling of each row.

    Raises:
        ValueError: no share between 0 and 3 gives this time (the signs at both ends are equal).
    """
    first_shape = LATER_SHAPES[0]

    def seconds(share: float, shape: LaterShape, num_data_ranks: int = 1) -> float:
        layout = Layout(tp_size=shape.tp_size, dp_size=num_data_ranks)
        return study_time(shape.config, layout, cluster, micro_batch_size, share).total

    share = optimize.brentq(lambda share: seconds(share, first_shape) - first_ms / 1e3, 1e-6, 3.0)
    first = first_shape.config, seconds(share, first_shape)
    return share, [
        efficiency(shape.config, shape.tp_size, seconds(share, shape, dp_size), *first) for shape in LATER_SHAPES
    ]


def scaled_to(cluster: Cluster, peak_fp16: float, copy_ratio: float, link_ratio: float) -> Cluster:
    """Transfer `cluster` to other devices: shares of the peak and of the links are kept, nothing is fitted."""
    rates, links = cluster.roofline, cluster.calibration
    changed = with_rates(
        cluster,
        product_tflops=peak_fp16,
        copy_gb_s=rates.copy_gb_s * copy_ratio,
        tensor_bandwidth_gb_s=links.tensor_bandwidth_gb_s * link_ratio,
        data_bandwidth_gb_s=links.data_bandwidth_gb_s * link_ratio,
    )
    return dataclasses.replace(changed, num_devices=max(1024, cluster.num_devices))


def with_rates(cluster: Cluster, **rates: float) -> Cluster:
    """Replace rates of kernels or messages of `cluster`."""
    links = {name: rates.pop(name) for name in list(rates) if name.endswith("_bandwidth_gb_s")}
    return dataclasses.replace(
        cluster,
        roofline=dataclasses.replace(cluster.roofline, **rates),
        calibration=dataclasses.replace(cluster.calibration, **links),
    )


def efficiency(
    config: TransformerConfig, tp_size: int, seconds: float, first: TransformerConfig, first_seconds: float
) -> float:
    """Weak scaling in percent: parameters per GPU and second over those of the first model, on one GPU."""
    ratio = count_parameters(config).total / count_parameters(first).total
    return 100 * ratio / tp_size * first_seconds / seconds
