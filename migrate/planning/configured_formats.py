"""Whether what a configuration says of number formats is what the tensors are.

A loader believes the configuration: a module that it calls plain and that holds codes loads as
noise, or not at all. Rule files write lists of modules, and libraries read lists in their own ways
(transformers takes an item for the end of a name), so what comes out is read again as the library
reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..core.errors import Diagnostic, listed, plural, printable
from ..rules.arguments import ENCODED_MODULES, PLAIN_MODULES
from ..source.module_lists import CONFIG, MODELOPT_CONFIG, QUANTIZATION
from ..source.quantization import Quantization, describe, read_quantization
from .encoded_modules import list_modules
from .graph import Tensor
from .sides import SideFiles


def changes_formats(changes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the accounts of changed side files has to do with number formats."""
    names = {*QUANTIZATION, "text_config"}
    return any(
        change["path"] == MODELOPT_CONFIG
        or (
            change["path"] == CONFIG
            and any(row["at"].split(".")[0] in names for row in change["changes"])
        )
        for change in changes
    )


def check_written(
    sides: SideFiles, outputs: Mapping[str, Tensor], left: Collection[str] = ()
) -> list[Diagnostic]:
    """M519 where the configuration that comes out says something else of modules than their tensors
    do; `left` are plain modules of a kind that is encoded. M513 for a configuration that cannot be
    read.
    """
    said, modules = read_quantization(sides.value), list_modules(outputs)
    encoded, plain = modules[ENCODED_MODULES], modules[PLAIN_MODULES]
    if said is None:
        what = f"{_some(encoded)} encoded, and no configuration says how"
        return [_warning(what)] if encoded else []
    out = [
        warning
        for one in (said, said.beside)
        if one is not None
        for warning in _contradictions(one, encoded, plain, left if encoded else ())
    ]
    if said.schemes and not encoded:
        out.append(_warning(f"{said.place} says {describe(said.schemes[0])}, and no module is"))
    return out


def _contradictions(
    said: Quantization, encoded: Sequence[str], plain: Sequence[str], left: Collection[str]
) -> list[Diagnostic]:
    left_out = [module for module in encoded if said.scheme_of(module) is None]
    # keys do not show of what kind other modules are, and kinds may stay plain
    named = [
        m
        for m in plain
        if (scheme := said.scheme_of(m)) is not None and (scheme.named or m in left)
    ]
    out = []
    if left_out:
        out.append(_warning(f"{_some(left_out)} encoded, and plain by {said.place}"))
    if named:
        how = describe(said.scheme_of(named[0]))
        out.append(_warning(f"{_some(named)} plain, and {how} by {said.place}"))
    return out


def _some(modules: Sequence[str]) -> str:
    are = "is" if len(modules) == 1 else "are"
    return f"{plural(len(modules), 'module')} ({listed(list(modules), 3)}) {are}"


def _warning(what: str) -> Diagnostic:
    return Diagnostic(
        "M519",
        printable(what, 600),
        help="a loader believes the configuration: correct it with `files:`, or encode and decode "
        "what it says",
    )
