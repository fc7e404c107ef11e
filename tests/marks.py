"""The marks that `make test` leaves out, and a word for "all of these, one by default"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import comb
from typing import Any

import pytest

# `make marks`, which .ci/run calls, runs these; `make campaign` what is left
MARKS = ("thorough", "ranks", "libraries", "servers", "filesystems")
CAMPAIGN = "campaign"
# `make gpu`: the tests that take the fixture `device`, on CUDA
GPU = "gpu"


def thorough(cases: Iterable[Any], *, default: int = 1) -> list[Any]:
    """The cases for `parametrize`: the first `default` of them run always, the others under the
    mark `thorough`.
    """
    return [case if number < default else marked(case) for number, case in enumerate(cases)]


def covering(*axes: Sequence[Any], rounds: int = 1) -> list[Any]:
    """Every combination for `parametrize`, those that a default run leaves out under the mark
    `thorough`: it takes each value of each axis once a round, beside others in another round.
    """
    longest = max(map(len, axes))
    taken = {
        tuple(
            (turn + (comb(turn // longest + number, number) if number else 0)) % len(axis)
            for number, axis in enumerate(axes)
        )
        for turn in range(longest * rounds)
    }
    return [
        case if places in taken else marked(case)
        for places, case in zip(
            product(*(range(len(axis)) for axis in axes)), product(*axes), strict=True
        )
    ]


def marked(case: Any) -> Any:
    """One case for `parametrize`, under the mark `thorough`."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.thorough])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
