"""Computing against communicating: R of a layout, from the two terms of the alpha-beta model of a message.

A message of n bytes takes alpha + beta n: a latency, and the bytes that a rank of a ring sends over the bandwidth.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..config import Layout
from ..config.cluster import Cluster
from .communication import Collective
from .step_time import collective_s


@dataclass(frozen=True)
class Balance:
    """Seconds of a rank in a step, as if nothing overlapped.

    Args:
        compute: everything but messages and the optimizer.
        latency: alpha, of all messages.
        transfer: beta n, of all messages.
    """

    compute: float
    latency: float
    transfer: float

    @property
    def messages(self) -> float:
        """latency + transfer."""
        return self.latency + self.transfer

    @property
    def ratio(self) -> float | None:
        """R = compute / messages; None for one rank, which sends nothing.

        Below 1 a layout is communication-bound: even perfect overlap could not hide all messages.
        """
        return self.compute / self.messages if self.messages else None

    def describe(self) -> str:
        """R in words."""
        if self.ratio is None:
            return "no messages: one rank"
        if self.ratio >= 1:
            return "compute-bound: perfect overlap could hide the messages"
        longer = "latency" if self.latency > self.transfer else "bytes"
        return (
            f"communication-bound: messages take {1 / self.ratio:.2f} times as long as computing, most of it {longer}"
        )


def balance_of(compute_s: float, collectives: Iterable[Collective], layout: Layout, cluster: Cluster) -> Balance:
    """Balance of a step: its computing, and its messages in full, however many of them are hidden.

    The pieces of a sum over the data ranks follow each other and have one latency together, as in `predict_step_time`.

    Source: Hockney 1994; Patarasuk and Yuan 2009 for a ring's 2 (p - 1) / p of the bytes.
    """
    latency, transfer, begun = 0.0, 0.0, set()
    for message in collectives:
        alpha = cluster.latency_us * 1e-6
        transfer += collective_s(message, layout, cluster) - message.count * alpha
        if message.group == "tensor":
            latency += message.count * alpha
        elif message.what not in begun:
            begun.add(message.what)
            latency += alpha
    return Balance(compute_s, latency, transfer)
