"""Recipes whose numbers Inductor could change, with Inductor: it fuses, reorders and keeps other precisions than eager.

They are tied weights (V01), odd sizes (V02), mixed dtypes (V08), accumulation (V09), two backward calls (V14), custom
autograd functions (V15) and checkpointing (V17); the others are about what is refused, named or left alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import RankGroup
from pair import under_inductor
from test_public_reports import accumulation_cases
from test_public_reports_backward import checkpointing_cases, custom_function_cases, two_backward_cases
from test_public_reports_optimizer import mixed_dtype_cases
from test_public_reports_params import odd_size_cases, tied_cases

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(700)]

CASES = (
    tied_cases,
    odd_size_cases,
    mixed_dtype_cases,
    accumulation_cases,
    two_backward_cases,
    custom_function_cases,
    checkpointing_cases,
)


@pytest.mark.parametrize("cases", CASES)
def test_recipe_with_inductor(ranks: Callable[[int], RankGroup], cases: Callable[[int], list[str]]) -> None:
    for rank, problems in enumerate(ranks(2).run(under_inductor, cases, timeout=600)):
        assert not problems, f"rank {rank}: " + "\n".join(problems)
