"""Ranks of torch.distributed for the tests that need several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """`ranks(world).run(module, function, …)`: processes that are started once for each number of
    them.
    """
    started: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        if world not in started or not started[world].alive:
            started[world] = Ranks(world, tmp_path_factory.mktemp(f"ranks{world}"))
        return started[world]

    yield of
    for one in started.values():
        if one.alive:
            one.close()
