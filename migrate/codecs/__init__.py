"""The number formats by name. One file per codec; importing this package imports none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..source.registry import Registry

if TYPE_CHECKING:
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
