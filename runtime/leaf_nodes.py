"""The AccumulateGrad nodes of parameters."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_OLD = "megabuf_fx old"
"""Marks nodes that are to be made anew."""


def leaf_nodes(params: Sequence[nn.Parameter]) -> list[Any]:
    """The nodes of ``params``, made on the current stream where there are none. Hold them: autograd keeps the node of a
    leaf only while somebody does."""
    return [torch.autograd.graph.get_gradient_edge(param).node for param in params]


def renew_leaf_nodes(nodes: list[Any], params: Sequence[nn.Parameter]) -> None:
    """Replace ``nodes`` by new ones of ``params``, on the current stream.

    Raises:
        RuntimeError: somebody else holds on to the old ones.
    """
    while nodes:
        nodes.pop().metadata[_OLD] = True
    gc.collect()
    nodes.extend(leaf_nodes(params))
    are_old = [node.metadata.pop(_OLD, False) for node in nodes]
    if any(are_old):
        raise RuntimeError(
            "a loss or an output of an earlier step is still held, and with it the autograd graph of the stream it ran "
            "on; drop it, or keep only its detach()"
        )
