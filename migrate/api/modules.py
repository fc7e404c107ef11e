"""Modules that a path names: `module:package.mod:build`, built without memory for their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, TypeGuard

from ..core.errors import fail, option, printable

if TYPE_CHECKING:
    import torch

PREFIX = "module:"
CODE = "code"


def names_module(path: object) -> TypeGuard[str]:
    """Whether the path names a callable that makes a module."""
    return isinstance(path, str) and path.startswith(PREFIX)


def built(path: str, allow: Iterable[str]) -> torch.nn.Module:
    """The module, on the meta device. Runs the callable, and all that its package does when it is
    imported: M115 unless that is allowed.
    """
    name = printable(path)
    package, _, attribute = path.removeprefix(PREFIX).partition(":")
    if not package or not attribute:
        fail("M115", f"{name} is not {PREFIX}PACKAGE.MODULE:CALLABLE")
    if CODE not in allow:
        fail(
            "M115",
            f"{name} would run code: `{printable(attribute)}` of `{printable(package)}`",
            help=f"allow it with {option('allow', CODE)} if you trust it",
        )
    import torch

    from ..live.module import is_module

    try:
        here = import_module(package)
        for part in attribute.split("."):
            here = getattr(here, part)
        with torch.device("meta"):
            module = here()  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - whatever the code does
        said = printable(f"{type(error).__name__}: {error}", 300)
        fail("M115", f"{name} raised {said}", help="it is called without arguments")
    if not is_module(module):
        fail("M115", f"{name} made {printable(type(module).__name__)}, which is no torch module")
    found: torch.nn.Module = module
    return found
