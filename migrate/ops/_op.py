"""The path that the contract of ops had in 0.1; now it is `migrate.ops.base`. For one release."""

from __future__ import annotations

import warnings
from typing import Any

from . import base

warnings.warn(
    "migrate.ops._op is now migrate.ops.base; the old name is removed in the next release",
    DeprecationWarning,
    stacklevel=2,
)
# what a class was called there
_CALLED = {"Step": "OpCall"}


def __getattr__(name: str) -> Any:
    return getattr(base, _CALLED.get(name, name))
