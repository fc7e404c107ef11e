"""Types and a number that all of the library shares."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

# where something lies, as callers may say it
PathLike: TypeAlias = "str | os.PathLike[str]"
# called with bytes that are done and bytes in all
Progress: TypeAlias = Callable[[int, int], None]
# of each JSON document that a command answers with, of plans and of stamps
FORMAT_VERSION = "1.0"
