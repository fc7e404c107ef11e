"""The lineages that ship for one family of models each, by what `config.json` says.

There are many, and a checkpoint is of one of them. So what decides that stands in one file, which
is made with the packaged form of the rules, and the lineages of other families are not read. A
lineage is of this kind if each of its layouts needs a config.json and names its model types.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..core.keys import parse
from . import files
from .lineage import Lineage

INDEX = "families.json"
# of what is written below; another one is not read
FORM = 1


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a lineage without reading it.

    words: for each layout the segments that keys of it have. size: that of its `layouts.yaml`,
    without which it counts for nothing.
    """

    name: str
    aliases: tuple[str, ...]
    model_types: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    size: int

    def is_in(self, folder: Path) -> bool:
        """Whether the lineage in this folder can be the one that this was made of."""
        try:
            return os.stat(folder / files.LAYOUTS).st_size == self.size
        except OSError:
            return False


def family_of(lineage: Lineage, size: int) -> Family | None:
    """What the index says of a lineage; None for one that has to be read."""
    words = []
    for layout in lineage.layouts:
        signs = layout.detect
        named = signs.config.get("model_type", ()) if signs is not None else ()
        if signs is None or not signs.configured or not named:
            return None
        if not all(isinstance(kind, str) for kind in named):
            return None
        segments = (segment for text in signs.present for segment in parse(text).anchors)
        words.append(tuple(sorted(set(segments))))
    return Family(lineage.name, lineage.aliases, tuple(lineage.model_types), tuple(words), size)


def text(found: Iterable[Family]) -> str:
    """The file."""
    lines = [
        json.dumps([f.name, list(f.aliases), list(f.model_types), [*map(list, f.words)], f.size])
        for f in found
    ]
    return f'{{"form": {FORM}, "families": [\n' + ",\n".join(lines) + "\n]}\n"


def families() -> Mapping[str, Family]:
    """The index of the rules that ship, by name; empty where there is none."""
    return _read(files.shipped_folder())


@cache
def _read(folder: Path) -> Mapping[str, Family]:
    try:
        known = json.loads((folder / INDEX).read_bytes())
        rows = known["families"] if known["form"] == FORM else ()
        found = [
            Family(name, tuple(aliases), tuple(kinds), tuple(map(tuple, words)), size)
            for name, aliases, kinds, words, size in rows
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {family.name: family for family in found}


def suiting(
    config: Any, has: Callable[[str], bool] | None = None, names: Sequence[str] = ()
) -> Callable[[Family], bool]:
    """Which families a checkpoint may be of: by what its config.json says. `has` says whether some
    key has a segment; without config.json it decides which families are near, else none is.
    `names` are taken in any case.
    """
    kind = config.get("model_type") if isinstance(config, dict) else None

    def suits(family: Family) -> bool:
        if family.name in names:
            return True
        if config is not None:
            return kind in family.model_types
        return has is not None and any(words and all(map(has, words)) for words in family.words)

    return suits
