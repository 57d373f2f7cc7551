"""Options of torch.compile for layers of several tensor ranks: what keeps messages beside computation."""

import heapq
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from .context import ParallelContext
from .fast_linear import KEEP_OVERLAP

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class WaitLast(CustomGraphPass):
    """Order a graph so that it waits for a message only when nothing else can start, and for the oldest message first.

    The halves of a micro-batch do not depend on each other, so that one is computed while the other's message travels.
    Between two waits messages keep the order of the program, so all ranks send them in the same order.

    Source: Wang et al. 2024, Domino (arXiv:2409.15241), for the two halves.
    """

    def __call__(self, graph: Graph) -> None:
        """Reorder the nodes in place."""
        position = {node: i for i, node in enumerate(graph.nodes)}
        unmet = {node: len(node.all_input_nodes) for node in graph.nodes}
        place: dict[Node, int] = {}  # in the new order

        def priority(node: Node) -> tuple[bool, int, int]:
            waits = node.target is _WAIT
            return waits, place[node.args[0]] if waits else position[node], position[node]

        ready = [(priority(node), node) for node in graph.nodes if not unmet[node]]
        heapq.heapify(ready)
        while ready:
            _, node = heapq.heappop(ready)
            place[node] = len(place)
            for user in node.users:
                unmet[user] -= 1
                if not unmet[user]:
                    heapq.heappush(ready, (priority(user), user))
        order = list(place)
        for node in reversed(order):  # a fused kernel stands where its first operation does, and its waits before it
            if torch.Tag.pointwise in getattr(node.target, "tags", ()) and node.users:
                place[node] = min(place[user] for user in node.users)
        end = graph.output_node()
        for node in sorted(order, key=place.__getitem__):
            if node is not end:
                end.prepend(node)

    def uuid(self) -> Any:
        """Key of this file's content for the compiler's cache."""
        return get_hash_for_files((__file__,))


_OVERLAP_HALVES = KEEP_OVERLAP | {
    "post_grad_custom_post_pass": WaitLast(),
    # Bytes that two kernels without a dependency must share to be fused. Those of the two halves share no more than a
    # LayerNorm's weights; fused, they would wait for both messages.
    "score_fusion_memory_threshold": 10**6,
}


def compile_options(context: ParallelContext) -> dict[str, Any] | None:
    """Options of torch.compile for a layer; None, torch's own, for one tensor rank."""
    if context.tp_size == 1:
        return None
    return _OVERLAP_HALVES if context.batch_halves else KEEP_OVERLAP
