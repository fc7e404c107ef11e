"""What ranks say of one that dies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ranks import Ranks


@pytest.mark.ranks
def test_ranks_that_die_are_named_and_not_waited_for(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(AssertionError, match=r"rank \d ended with [01]"):
        ranks(2).run("os", "_exit")
    # others come in their place
    ranks(2).run("gc", "collect")
