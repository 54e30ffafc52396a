"""What a pass promises, and how it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node


class PassError(RuntimeError):
    """A graph is not what a pass can handle; the message names the pass, the node and what was expected."""

    def __init__(self, pass_name: str, problem: str, node: Node | None = None) -> None:
        where = f" at node '{node.name}' ({node.op} {node.target})" if node is not None else ""
        super().__init__(f"pass {pass_name}{where}: {problem}")


@dataclass(frozen=True, slots=True)
class GraphPass:
    """Contract of a pass: ``requires`` and ``provides`` are facts about the graph that later passes rely on."""

    name: str
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    preserves_numerics: bool = True
    """False when results can differ in rounding; such passes can be switched off."""


def validate_order(passes: Sequence[GraphPass], *, given: Sequence[str] = ()) -> None:
    """Check that each pass finds what it requires among ``given`` and what earlier passes provide.

    Raises:
        ValueError: a requirement is not met; names the pass and the fact.
    """
    facts = set(given)
    for graph_pass in passes:
        missing = [fact for fact in graph_pass.requires if fact not in facts]
        if missing:
            raise ValueError(f"pass {graph_pass.name} requires {missing}, but only {sorted(facts)} hold before it")
        facts.update(graph_pass.provides)


PassFn = Callable[..., GraphModule]
