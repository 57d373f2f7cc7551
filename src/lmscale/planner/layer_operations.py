"""Operations of one transformer layer, compiled for a GPU: each row is a kernel, or a kernel and its small reductions.

Legend: as in `step_operations.py`; own tokens of a rank outside the parallel region, b s or with sequence parallelism
b s / p.
"""

from typing import Any

from ..config import Layout
from .communication import INPUT_GRADIENTS, INPUTS, INPUTS_AGAIN, OUTPUT_GRADIENTS, OUTPUTS
from .operation import Core, Operation, product
from .workload import Workload

MAGNITUDE = ", largest magnitude"  # of what float8 gathers for a product, see `_magnitude`
NORM_INPUT_BYTES = 4  # per element: the normalized input of the MLP's LayerNorm, recomputed in fp32
FLOAT8_LAUNCHES = 21, 13  # forward and backward, besides those in bf16


class LayerCounts:
    """The operations of one layer on one rank, on a micro-batch or, with `batch_halves`, on half of one.

    Args:
        placement: the layer's `NormPlacement`, one of `stage_placements`.
    """

    def __init__(self, job: Workload, layout: Layout, placement: Any) -> None:
        b = job.micro_batch_size // layout.batch_parts
        part, config, p = job.change(b), job.config, layout.tp_size
        self.config, self.placement, self.seq_length = config, placement, job.seq_length
        self.e, self.float8 = job.weight_bytes, job.dtype == "fp8"
        self.tokens, self.own = part.tokens, part.own_tokens(layout)
        self.width, self.mlp = config.hidden_size, config.ffn_size // p
        self.inner, self.batch_heads = config.padded_width(p) // p, b * config.padded_heads(p) // p
        self.mask = 1 if config.hidden_dropout > 0 else 0  # bytes of a kept dropout mask per element
        # Only float8 code keeps the mask of the dropout after attention; other code hashes again.
        self.rounded_mask = self.mask if self.float8 else 0

    @property
    def _cuts_sequence(self) -> bool:
        return self.own < self.tokens

    @property
    def _is_pre(self) -> bool:
        return bool(self.placement.before)

    def forward(self, phase: str) -> list[Operation]:
        """The forward pass, or its recomputation."""
        t, h, a, f, e = self.tokens, self.width, self.inner, self.mlp, self.e
        row = self.own * h
        found = [Operation("attention LayerNorm", phase, row * e, row * e)] if self._is_pre else []
        found += self._gathered(self._product("QKV", phase, t, 3 * a, h), INPUTS)
        found += [*self._qk_norms(phase, 2 * t * a * e, 2 * t * a * e, 2), *self._core(phase)]
        found.append(self._product("attention projection", phase, t, h, a))
        small = 2 if self.mask else 1
        name = "attention dropout, residual, LayerNorm"
        written, outputs = row * (e + self.rounded_mask), {"starts": OUTPUTS, "needs": OUTPUTS}
        found.append(Operation(name, phase, row * 2 * e, written, small, **outputs))
        found += self._gathered(self._product("MLP up", phase, t, f, h), INPUTS)
        found.append(Operation("GELU", phase, t * f * e, t * f * e))
        found.append(self._product("MLP down", phase, t, h, f))
        name, read, written = "MLP dropout, residual, LayerNorm", row * 2 * e, row * (2 * e + self.mask)
        if self._is_pre:
            name, read, written = "MLP dropout, residual", row * (3 * e + self.rounded_mask), row * (e + self.mask)
        found.append(Operation(name, phase, read, written, **outputs))
        found += self._more_norms(phase, row * e, row * e, 1)
        if self.float8:
            found.append(self._rounding_forward(phase))
        return found

    def backward(self) -> list[Operation]:
        """The backward pass, with what selective recomputation repeats of the GELU."""
        t, h, a, f, e = self.tokens, self.width, self.inner, self.mlp, self.e
        row, inner_gradient = self.own * h, 3 * t * a * e
        found = self._end_backward(row)
        found += self._row_gradients("MLP down", t, h, f)
        again = t * f * e if self.config.recompute == "selective" else 0
        found.append(Operation("GELU", "backward", 2 * t * f * e, t * f * e + again))
        # Its first sum is in the kernel of the GELU's gradient, but not in float8, which rounds in between.
        read, launches = (t * f * e, 2) if self.float8 else (0, 1)
        found.append(Operation("MLP up, bias", "backward", read, 0, launches))
        found += self._column_gradients("MLP up", "MLP input", t, f, h, again=(0, row * e, 0))
        wide = NORM_INPUT_BYTES
        found.append(Operation("MLP LayerNorm, again", "backward", row * 2 * e, row * (self.rounded_mask + wide)))
        kept = 0 if self._is_pre else self.mask
        written = 2 * e if self.mask else e
        name = "MLP LayerNorm, residual, dropout"
        read = row * (2 * e + wide + self.rounded_mask + kept)
        found.append(Operation(name, "backward", read, row * written, 3, needs=INPUT_GRADIENTS))
        found.append(Operation("attention projection, bias", "backward", row * (e + self.rounded_mask), 0, 2))
        found += [*self._row_gradients("attention projection", t, h, a), *self._core("backward")]
        found += self._qk_norms("backward", 4 * t * a * e, 2 * t * a * e, 6)
        if not self.float8:  # which rounds the three gradients from where the core left them
            found.append(Operation("QKV gradient, packing", "backward", inner_gradient, inner_gradient))
        found.append(Operation("QKV, bias", "backward", inner_gradient, 0, 2))
        found += self._column_gradients("QKV", "attention input", t, 3 * a, h, again=(row * e, row * e, 1))
        name, read, launches = ("attention LayerNorm, residual", 3, 3) if self._is_pre else ("residual", 2, 1)
        found.append(Operation(name, "backward", row * read * e, row * e, launches, needs=INPUT_GRADIENTS))
        found += self._more_norms("backward", row * 2 * e, row * e, 3)
        if self.float8:
            found.append(self._rounding_backward())
        return found

    def core_again(self) -> list[Operation]:
        """What selective recomputation repeats of the attention core: nothing of a fused one."""
        if self.config.attention != "exact":
            return []
        return [o for o in self._core("recomputation") if o.name != "attention output"]

    def gradients_read_again(self) -> Operation:
        """Weight gradients of the first half, to which the products of the second add theirs."""
        num_weights = 4 * self.inner * self.width + 2 * self.mlp * self.width
        return Operation("weight gradients of the first half", "backward", num_weights * self.e, 0, 0)

    def _end_backward(self, row: int) -> list[Operation]:
        """The start of the backward pass: dropout, or in post-norm LayerNorm, and the bias of the MLP."""
        e, mask = self.e, self.mask
        if not self._is_pre:
            written = row * (2 * e if mask else e)
            return [Operation("MLP LayerNorm, dropout, bias", "backward", row * (2 * e + mask), written, 5)]
        if not mask:
            return [Operation("MLP down, bias", "backward", row * e, 0, 2)]
        found = [Operation("MLP dropout, bias", "backward", row * (e + mask), row * e, 2)]
        return found + [Operation("MLP down, bias", "backward", row * (e + mask), 0)] * self.float8

    def _more_norms(self, phase: str, read: int, written: int, launches: int) -> list[Operation]:
        """LayerNorms beyond two per layer."""
        number = self.placement.num_layer_norms - 2
        return [Operation("further LayerNorms", phase, read, written, launches)] * number

    def _qk_norms(self, phase: str, read: int, written: int, launches: int) -> list[Operation]:
        return [Operation("QK LayerNorms", phase, read, written, launches)] * self.config.qk_norm

    def _product(self, name: str, phase: str, m: int, n: int, k: int) -> Operation:
        return product(name, phase, m, n, k, self.e, self.float8)

    def _gradients(self, name: str, rows: int, out: int, inner: int) -> list[Operation]:
        return [
            self._product(f"{name}, gradient of the input", "backward", rows, inner, out),
            self._product(f"{name}, gradient of the weight", "backward", out, inner, rows),
        ]

    def _row_gradients(self, name: str, rows: int, out: int, inner: int) -> list[Operation]:
        of_input, of_weight = self._gradients(name, rows, out, inner)
        return [*self._gathered(of_input, OUTPUT_GRADIENTS), of_weight]

    def _column_gradients(
        self, name: str, x: str, rows: int, out: int, inner: int, again: tuple[int, int, int]
    ) -> list[Operation]:
        """With sequence parallelism the input is gathered again: `again` are read, written and launches of its copy,
        for the MLP in the kernel of a LayerNorm."""
        of_input, of_weight = self._gradients(name, rows, out, inner)
        of_weight = of_weight._replace(starts=INPUT_GRADIENTS)
        if not self._cuts_sequence:
            return [of_input, of_weight]
        copied = Operation(f"{x}, again", "backward", *again)
        of_input = of_input._replace(starts=INPUTS_AGAIN)
        return [copied, of_input, *self._gathered(of_weight, INPUTS_AGAIN, starts=INPUT_GRADIENTS)]

    def _gathered(self, product: Operation, what: str, starts: str | None = None) -> list[Operation]:
        """A product that, with sequence parallelism, needs what is gathered, from when it starts or earlier.

        Float8 reads that once more: without an all-gather in between, the kernel that computes it finds the largest
        magnitude.
        """
        if not self._cuts_sequence:
            return [product]
        messages = {"starts": what if starts is None else starts, "needs": what}
        if not self.float8:
            return [product._replace(**messages)]
        read = self.tokens * self.width * self.e
        found = Operation(product.name + MAGNITUDE, product.phase, read, 0, 2, **messages)
        return [found, product._replace(starts="")]

    def _core(self, phase: str) -> list[Operation]:
        s, d, number, e = self.seq_length, self.config.head_size, self.batch_heads, self.e
        values = self.tokens * self.inner * e  # of one of Q, K, V
        is_backward = phase == "backward"
        drops, causal = self.config.attention_dropout > 0, self.config.traits.is_causal
        if self.config.attention != "exact":
            flops, sums = 4 * number * s * s * d, 4 * number * s
            launches, read, written = 1, 3 * values, values + sums
            if is_backward:
                flops, launches, read, written = 2 * flops, 3, 5 * values + sums, 3 * values
            work = Core(s, d, causal, drops, is_backward)
            return [Operation("attention core", phase, read, written, launches, flops, work)]
        scores = number * s * s
        if is_backward:
            return [
                *(
                    product(f"attention {what}", phase, s, d, s, e, batch=number)
                    for what in ("values", "queries", "keys")
                ),
                product("attention probabilities", phase, s, s, d, e, batch=number),
                Operation("attention softmax", phase, 2 * scores * e, scores * e),
                Operation("attention copies", phase, values, values),
            ]
        return [
            Operation("attention copies", phase, 4 * values, 4 * values, 4),
            product("attention scores", phase, s, s, d, e, batch=number),
            Operation("attention softmax", phase, scores * e, scores * e),
            product("attention output", phase, s, d, s, e, batch=number),
        ]

    def _rounding_forward(self, phase: str) -> Operation:
        """Largest magnitudes and rounding of inputs and weights; QKV's bias is added in a pass of its own."""
        t, h, a, f, e = self.tokens, self.width, self.inner, self.mlp, self.e
        weights = 4 * a * h + 2 * f * h
        read = t * ((2 * h + a) * e + a * e + 3 * a * e) + weights * 2 * e
        written = t * (2 * h + a + f + 3 * a * e) + weights
        return Operation("rounding to float8", phase, read, written, FLOAT8_LAUNCHES[0])

    def _rounding_backward(self) -> Operation:
        """Gradients in both orders, inputs and weights once more."""
        t, h, a, f, e = self.tokens, self.width, self.inner, self.mlp, self.e
        out, inner, weights = 3 * a + 2 * h + f, 2 * h + a + f, 4 * a * h + 2 * f * h
        read, written = (t * (out + inner) + weights) * e, t * (2 * out + inner) + weights
        return Operation("rounding to float8", "backward", read, written, FLOAT8_LAUNCHES[1])
