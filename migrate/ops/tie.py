"""`tie`: one tensor under several names that are meant to share memory."""

from __future__ import annotations

from .copy import Copy


class Tie(Copy):
    summary = "gives one tensor several names that share its memory"
    shares = True


OP = Tie()
