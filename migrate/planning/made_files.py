"""Side files that a layout has and a checkpoint comes without: `layouts.yaml` says what they are
made of, and what speaks of its params is the checkpoint as it is in that layout.

They are made at the end of a step, when its tensors are known, and only where nothing patched or
carried the file before. What is missing for one is a note and no refusal: the tensors are right
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.errors import listed, option, printable
from ..core.keys import Pattern
from ..rules import params as parameters
from ..rules.arguments import PARAM, is_condition
from ..rules.file_patches import made_params
from ..rules.files import VALUES
from .patches import apply_patch, fill_patch

if TYPE_CHECKING:
    from ..rules.compiled import CompiledRule
    from ..rules.lineage import Layout
    from ..rules.param_model import Param
    from .sides import SideFiles


@dataclass(frozen=True, slots=True)
class ReachedLayout:
    """Stands for a step where tensors are asked for the params of the layout that they are in."""

    backwards: bool = False
    rules: tuple[tuple[CompiledRule, Mapping[str, Any]], ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)

    def reads(self) -> list[Pattern]:
        """The patterns that are read: none."""
        return []


# what the checkpoint and the rules say of some params: (source for messages, {param: value})
Says = Callable[["Mapping[str, Param]"], "list[tuple[str, Mapping[str, Any]]]"]


def make_files(
    layout: Layout, paths: Sequence[str], sides: SideFiles, given: Mapping[str, Any], says: Says
) -> Iterator[str]:
    """Makes the layout's files that are not there, of these; a note for each that lacks something.
    Of the values beside a model each is made that is not there.
    """
    for path in paths:
        there = sides.value(path)
        if there is not None and (path != VALUES or _names(layout.files[path]) <= there.keys()):
            continue
        made, missing = make_file(layout, path, given, says)
        if made is not None:
            sides.put_value(path, {**made, **(there or {})} if there else made)
            continue
        names = listed([f"`{name}`" for name in missing])
        what = f"{printable(path)} is" if path != VALUES else f"{listed(_shown(layout))} are"
        yield (
            f"{what} not made, because nothing says {names}: "
            f"{option('params', f'{missing[0]}=…')} does, or a file beside the checkpoint"
        )


def _names(made: Any) -> set[str]:
    """The names at the top of an object that is made, or of several that are merged."""
    parts = made if isinstance(made, (list, tuple)) else [made]
    return {name for part in parts for name in part if not is_condition(name)}


def _shown(layout: Layout) -> list[str]:
    return [f"`{name}`" for name in sorted(_names(layout.files[VALUES]))]


def make_file(
    layout: Layout, path: str, given: Mapping[str, Any], says: Says
) -> tuple[dict[str, Any] | None, list[str]]:
    """The object in the file; or None and the params without a value. M114 and M510 for values that
    a param cannot have, or that differ.
    """
    used = made_params({path: layout.files[path]})
    declared = {name: param for name, param in layout.params.items() if name in used}
    optional = {
        name: param.model_copy(update={"optional": True}) for name, param in declared.items()
    }
    asked = {name: value for name, value in given.items() if name in declared}
    values = parameters.resolve(optional, asked, says(declared))
    missing = [n for n, param in declared.items() if n not in values and not param.optional]
    if missing:
        return None, missing
    return apply_patch({}, fill_patch(layout.files[path], values, PARAM)), []
