"""Options of torch.compile for a model's layers: fewer bytes on a GPU, and messages beside computation."""

import heapq
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from ..parallel import ParallelContext

_WAIT = torch.ops._c10d_functional.wait_tensor.default

# Options of torch.compile for layers of several tensor ranks. Inductor reorders a graph to save memory, and fusion can
# pull the wait for a collective before the product that should hide it. "sink_waits" moves each wait to where its
# result is first used.
KEEP_OVERLAP = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits"],
}

# Inductor stores a value that takes more operations than this and that is used several times. At its default of 30 it
# stores the int32 hash of every dropout mask, 4 bytes per element, instead of hashing again, which reads nothing. In
# the optimizer's update it stores the hash that rounds bf16 moments.
# Layers have it on a GPU, whose element-wise kernels wait for memory; on a CPU it was not measured.
HASH_AGAIN = {"realize_opcount_threshold": 100}


def compiler_options(context: ParallelContext, on_gpu: bool, cuda_graphs: bool = False) -> dict[str, Any]:
    """The options with which a rank compiles its layers.

    Args:
        cuda_graphs: record the layers and replay them.
    """
    options: dict[str, Any] = {}
    if context.tp_size > 1:
        options |= KEEP_OVERLAP
        if context.batch_halves:
            options |= OVERLAP_HALVES
    if on_gpu:
        options |= HASH_AGAIN
    if cuda_graphs:
        options["triton.cudagraphs"] = True
    return options


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


OVERLAP_HALVES = {
    "post_grad_custom_post_pass": WaitLast(),
    # Bytes that two kernels without a dependency must share to be fused. Those of the two halves share no more than a
    # LayerNorm's weights; fused, they would wait for both messages.
    "score_fusion_memory_threshold": 10**6,
}
