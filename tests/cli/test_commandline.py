"""The tripwire that every command line of these tests runs under must be able to trip."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import commandline
import pytest

import migrate.cli.main


def test_a_command_that_unpickles_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = pickle.dumps(OrderedDict, 2)
    monkeypatch.setattr(migrate.cli.main, "run", lambda arguments: pickle.loads(stream) and 0)
    with pytest.raises(AssertionError, match=r"pickle\.find_class"):
        commandline.run("inspect", "x")
    monkeypatch.setattr(migrate.cli.main, "run", lambda arguments: 0)
    assert commandline.run("inspect", "x").exit == 0
