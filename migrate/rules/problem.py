"""What is wrong with a value of a rule file. Alone here, so that what only plans does not load the
model that rule files are read by.
"""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """A diagnostic without its place.

    `at` is the path below the value that was refused, `key` points at the key there instead of the
    value, and `part` narrows the place to code points (start, end) of the value's text.
    """

    code: str
    message: str
    help: str | None = None
    at: tuple[str | int, ...] = ()
    key: bool = False
    part: tuple[int, int] | None = None

    def below(self, *path: str | int) -> Problem:
        """The problem as one of the value that holds this one at `path`."""
        return self._replace(at=(*path, *self.at))
