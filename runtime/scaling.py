"""How gradients become averages: a factor before the collective and the collective's own (semantics §5).

    mode                        dense          expert           collective
    default                     1 / dp         1 / dp           sum
    average_in_collective       1              edp / dp         average
    calculate_per_token_loss    1              1                sum

``dp`` and ``edp`` are the full sizes, whatever the number of optimizer instances. Expert gradients are divided by
``dp``, too: their tokens come from all data-parallel ranks. Factors are exact rationals, so no size is refused because
a float comes out unequal, as happens to Megatron with ``(dp, edp) = (33, 11)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class GradScaling:
    """What happens to the gradients of one buffer."""

    factor: Fraction
    """Multiplies the whole bucket before the collective."""
    average: bool
    """The collective divides by its size instead of summing only."""


def grad_scaling(
    *, dp_size: int, expert_dp_size: int, is_expert: bool, average_in_collective: bool, calculate_per_token_loss: bool
) -> GradScaling:
    """The scaling of dense or expert gradients.

    Raises:
        ValueError: both modes; an expert group that does not divide the data-parallel group.
    """
    if average_in_collective and calculate_per_token_loss:
        raise ValueError("cannot average in the collective (average_in_collective) with calculate_per_token_loss")
    if is_expert and dp_size % expert_dp_size:
        raise ValueError(f"the expert group has {expert_dp_size} ranks, which do not divide {dp_size} ranks")
    if calculate_per_token_loss:
        return GradScaling(Fraction(1), average=False)
    if average_in_collective:
        return GradScaling(Fraction(expert_dp_size, dp_size) if is_expert else Fraction(1), average=True)
    return GradScaling(Fraction(1, dp_size), average=False)
