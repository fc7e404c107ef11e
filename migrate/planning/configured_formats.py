"""Whether what a configuration says of number formats is what the tensors are, before and after.

A loader believes the configuration: a module that it calls plain and that holds codes loads as
noise, or not at all. Rule files write lists of modules, and libraries read lists in their own ways
(transformers takes an item for the end of a name), so what comes out is read again as the library
reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import Diagnostic, MigrateError, listed, plural, printable
from ..rules.arguments import ENCODED_MODULES, PLAIN_MODULES
from ..source.module_lists import CONFIG, MODELOPT_CONFIG, QUANTIZATION
from ..source.quantization import (
    Quantization,
    Scheme,
    contradiction,
    describe,
    read_quantization,
)
from .encoded_modules import list_modules
from .graph import Tensor, computations
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


def check_written(sides: SideFiles, outputs: Mapping[str, Tensor]) -> list[Diagnostic]:
    """M519 where the configuration that comes out says something else of modules than their tensors
    do. M513 for a configuration that cannot be read.
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
        for warning in _contradictions(one, encoded, plain)
    ]
    if said.schemes and not encoded:
        out.append(_warning(f"{said.place} says {describe(said.schemes[0])}, and no module is"))
    return out


def check_read(sides: SideFiles, outputs: Mapping[str, Tensor]) -> list[Diagnostic]:
    """M519 where tensors are decoded otherwise than the configuration of the source says; `sides`
    are those of the source.

    A codec holds its arguments against the shapes of the parts, so the parts are what they are
    decoded as, and the configuration is wrong.
    """
    found: dict[tuple[Scheme, Scheme], list[str]] = {}
    said: Quantization | None = None
    for call in computations(outputs.values()):
        if call.op_call.op != "dequantize" or not call.keys:
            continue
        if said is None:
            try:
                said = read_quantization(sides.value)
            except MigrateError as error:
                return [_warning(diagnostic.message) for diagnostic in error.diagnostics]
            if said is None:
                return []
        module, decoded = call.keys[0].rpartition(".")[0], _decoded_as(call.op_call.args)
        # a rule decodes what it was written for, whatever a list leaves out
        scheme = said.scheme_of(module)
        if scheme is not None and contradiction(module, scheme, decoded) is not None:
            found.setdefault((scheme, decoded), []).append(module)
    return [
        _warning(
            f"{_some(modules)} decoded as {describe(decoded)}, and {describe(scheme)} by "
            f"{scheme.place}"
        )
        for (scheme, decoded), modules in found.items()
    ]


def _decoded_as(args: Any) -> Scheme:
    """What the arguments of a `dequantize` say, in the terms of configurations."""
    own = args.codec_args
    block = getattr(own, "block", None)
    return Scheme(
        args.codec,
        bits=getattr(own, "bits", None),
        group=getattr(own, "group", None),
        block=tuple(block) if isinstance(block, (list, tuple)) and len(block) == 2 else None,
        granularity=getattr(own, "granularity", None),
        form=getattr(own, "form", None),
        place="tensors",
    )


def _contradictions(
    said: Quantization, encoded: Sequence[str], plain: Sequence[str]
) -> list[Diagnostic]:
    left_out = [module for module in encoded if said.scheme_of(module) is None]
    named = [m for m in plain if (scheme := said.scheme_of(m)) is not None and scheme.named]
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
