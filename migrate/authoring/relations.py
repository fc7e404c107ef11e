"""What importers and inference find out about two layouts, and the rules that are made of it.

A `Relation` speaks of keys as they stand in one pair of checkpoints. `compact` makes `RuleDraft`s
of many relations, which hold for other numbers of layers too, and `writing` writes those down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# one pattern, or several by role: numbered from "0" where the roles have no names
Patterns: TypeAlias = "str | tuple[str, ...] | Mapping[str, str]"


@dataclass(frozen=True, slots=True)
class Relation:
    """One rule over concrete keys: what it reads, what it makes, and how.

    sources: keys of the old checkpoint, in the order in which the ops take them. targets: keys of
    the new one, in the order in which the ops make them; empty for `drop`. ops: as in a rule file,
    but for `over`, `into` and `start`, which follow from the keys; none is a rename, or `keep`
    where source and target are one key.

    With several joins the first one takes runs of neighbouring sources, the next one runs of its
    results, and all but the last say by `count` or `sizes` how many. With several parts it is the
    other way round: the first one's pieces are the runs of targets. `only` is a list of positions:
    which of the tensors that the nearest join takes, or part makes, are meant.

    roles: names of the sources, for ops that read them by name. guessed: names alone decided. note:
    why, as a comment in the file. fields: further fields of the rule as in a rule file, such as
    `keep_source` or `optional`.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ops: tuple[Mapping[str, Any], ...] = ()
    guessed: bool = False
    note: str | None = None
    roles: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether the key stays as it is, so that `keep` says it and no rule."""
        return self.sources == self.targets and not self.ops and not self.fields


@dataclass(frozen=True, slots=True)
class RuleDraft:
    """A rule as it is written, or a pattern of `keep` where `keep` is true; then `sources` is that
    pattern and the rest is empty.

    keys: the keys that it takes of the checkpoint that it was made for.
    """

    name: str
    sources: Patterns
    targets: Patterns = ()
    via: tuple[Mapping[str, Any], ...] = ()
    map: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = False
    guessed: bool = False
    note: str | None = None
    keys: tuple[str, ...] = ()
