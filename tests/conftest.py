"""What all tests share: the command line helpers, and the campaign, which runs only when it is asked for."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

# what is started in the background of a shell ignores Ctrl-C, and so would every process that the tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("cli", "source")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the campaign out unless `-m` names it."""
    if "campaign" in config.getoption("markexpr"):
        return
    out = [item for item in items if item.get_closest_marker("campaign")]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
