"""Problems are kept in words up to a number and counted beyond it."""

from __future__ import annotations

import pytest

from migrate.core.errors import CheckpointError, Diagnostic
from migrate.source.pickle.decoding import MOST, StreamProblems


def test_nothing_found_raises_nothing() -> None:
    StreamProblems("x").check()


def test_the_first_ones_are_said_and_the_rest_is_counted() -> None:
    found = StreamProblems("\x1b[31mx")
    for number in range(1000):
        found.add("M936", f"problem {number}", help="mend it")
    with pytest.raises(CheckpointError) as caught:
        found.check(Diagnostic("M935", "first"))
    said = caught.value.diagnostics
    assert [d.code for d in said] == ["M935"] + ["M936"] * (MOST + 1)
    assert said[1].message == "\\x1b[31mx: problem 0"
    assert said[1].help == "mend it"
    assert said[-1].message == "\\x1b[31mx: 980 more contradictions like these"
    assert found.count == 1000
