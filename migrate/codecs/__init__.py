"""The number formats by name. One file per codec; importing this package imports none of them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ..source.registry import BrokenEntryError, Registry

if TYPE_CHECKING:
    from ..core.part_names import PartNames
    from .base import Codec

registry: Registry[Codec] = Registry("migrate.codecs", "migrate.codecs", "CODEC")


def get(name: str) -> Codec:
    """The codec called `name` (`fp8-block`). KeyError without one, BrokenEntryError if broken."""
    try:
        return registry.get(name.replace("-", "_"))
    except KeyError:
        # the entry point of a third party may be spelled as rules spell the codec
        return registry.get(name)


def names() -> list[str]:
    """The names of all codecs as rules write them, sorted; imports none of them."""
    return [name.replace("_", "-") for name in registry.names()]


def part_names() -> PartNames:
    """What the parts of all number formats are called, of those too that have no codec yet."""
    return _part_names(tuple(names()))


def why_undecodable(name: str) -> str | None:
    """Why no codec decodes the format of this name; None for any other name."""
    from ._formats import UNDECODABLE

    return UNDECODABLE.get(name)


@lru_cache(maxsize=4)
def _part_names(codecs: tuple[str, ...]) -> PartNames:
    from ..core.part_names import PartNames
    from ._formats import FORMATS

    known = []
    for name in codecs:
        try:
            known += [(name, naming) for naming in get(name).names]
        except BrokenEntryError:
            # a codec that no rule names may be broken
            continue
    return PartNames([*known, *FORMATS])
