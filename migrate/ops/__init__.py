"""The ops by name. One file per op; importing this package imports none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..source.registry import Registry

if TYPE_CHECKING:
    from ._op import Op

registry: Registry[Op] = Registry("migrate.ops", "migrate.ops", "OP")


def get(name: str) -> Op:
    """The op called `name`. KeyError if there is none, BrokenEntryError if a third party's does not
    load.
    """
    return registry.get(name)


def names() -> list[str]:
    """The names of all ops, built-in and third-party, sorted; imports none of them."""
    return registry.names()
