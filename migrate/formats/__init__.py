"""Formats: each opens a `Source` and describes a `Target`; one module a format, found by its name.

A module holds `FORMAT`, an object with the members of `base.Format`; modules that start with `_`
are no formats. A place is opened once, all formats look at it without reading more than its head
and its names, and the surest takes it. No second format tries after the first has refused: a
fallback to a laxer reader is how unsafe files get in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from ..core import log
from ..core.errors import MigrateError, fail, listed, option, plural, printable, refusal
from ..core.types import PathLike
from ..source.index import Source
from ..source.paths import METADATA, Place, metadata_files, stays_behind
from ..source.places import find_place
from ..source.registry import BrokenEntryError, Registry
from ..source.shards import by_rank
from ..source.target import Target, TargetTree
from ..source.tree import FileTree
from ..source.urls import is_url
from .base import SURE
from .base import Format as Format

if TYPE_CHECKING:
    from ..source.grids import AskedGrid, WrittenGrid
    from ._dcpdescribed import DescribedEntries
    from ._dcpentries import SavedTree

__all__ = [
    "FORMATS", "PARTS", "Format", "as_saved", "describe_entries", "fit_grid", "foreign_endings",
    "get", "holds_trees", "is_foreign", "open", "roots_of_grid", "tree_as_saved",
    "without_distributed",
]  # fmt: skip


# files of torch.distributed.checkpoint
_DATA, _DCP = ".distcp", "dcp"
# what Megatron puts beside them
_COMMON, _MARKER, _TORCH_DIST = "common.pt", "metadata.json", "torch_dist"
_GGUF_SUFFIX, _GGUF = ".gguf", "gguf"
# headers alone, which stand for a checkpoint where no bytes are read
_SAVED_INDEX = "saved_index"
# of parts with coordinates, and what they and their weights are called
PARTS = "parts"
_PART_NAME = re.compile(r"^(?:mp_rank_|model_(?:optim_)?rng\.pt)", re.MULTILINE)
# what the names in the folder of a training run begin with, and hardly any others
_RUN = ("latest_checkpointed_iteration", "iter_", "release")
# `memory` has no place on disk: its FORMAT is None
FORMATS: Registry[Format | None] = Registry("migrate.formats", "migrate.formats", "FORMAT")


def open(  # noqa: A001 - formats.open reads well
    path: PathLike,
    allow_links: bool = False,
    at: str | None = None,
    *,
    lazily: Callable[[str], bool] | None = None,
    extensions: Any = None,
    parts: str | None = None,
    carry: bool = False,
    side: str | None = None,
    headers: bool = False,
) -> Source:
    """The checkpoint at `path`, opened. M917 (a wrong question) if there is none or no format knows
    it, else M9xx.

    `path` is a file, an index file or a folder, also that of a training run. `allow_links` follows
    links to files wherever they lead. `at` is the dict in a nested checkpoint that rules shall work
    on, `parts` what a number in the names of parts counts. `lazily`: chunks that seem alike of a
    tensor of which it says so are taken to be alike until `confirm` of the source looks at those
    that are read. `extensions`: torch's registry of stream extensions, whose classes are the
    caller's own code. `carry`: what is outside the allow-list stands in the tree, to be written
    again. The side files of the folder `side` are taken as if they lay beside it. `headers`: no
    bytes of tensors are needed, so that a file of headers alone will do; M986 for one otherwise.
    """
    place = find_place(path, allow_links, at)
    notes: tuple[str, ...] = ()
    try:
        if any(name.startswith(_RUN) for name in place.names):
            from ._runs import resolve

            place, notes = resolve(place)
        place = replace(place, lazily=lazily, extensions=extensions, parts=parts, carry=carry)
        chosen = _pick(place)
        with log.phase(f"reading the headers of {printable(place.path, 240)}"):
            source = chosen.open(place)
        if not headers and chosen.name == _SAVED_INDEX:
            from .saved_index import refuse

            refuse(place.path)
        if notes:
            source.index = replace(source.index, notes=(*notes, *source.index.notes))
        held = source.index
        counted = plural(len(held.files), "file"), plural(len(held.tensors), "tensor")
        log.debug("%s is %s: %s, %s", printable(place.path, 240), source.format, *counted)
        if side is not None:
            from ..source.reference_folder import with_reference

            source = with_reference(source, side, allow_links)
        return source
    except OSError as error:
        place.close()
        fail("M901", f"{printable(place.path, 240)}: {refusal(error)}")
    except BaseException:
        place.close()
        raise


def _pick(place: Place) -> Format:
    builtin = FORMATS.builtin()
    named = [name for name in place.names if name.endswith((_DATA, METADATA, _GGUF_SUFFIX))]
    chunks = named and (metadata_files(named) or any(name.endswith(_DATA) for name in named))
    # no file beside `.metadata` is the checkpoint, and without chunks its format is not asked; nor
    # is that of GGUF files before the others, where no file is called so
    idle = {_DCP, _TORCH_DIST, PARTS, _SAVED_INDEX, *(() if named else (_GGUF,))}
    asked = (_DCP,) if chunks and not _left_over(place) else [n for n in builtin if n not in idle]
    if _MARKER in place.names or place.path.endswith(METADATA):
        asked = (_TORCH_DIST, *asked)
    if place.path.endswith(".json") and b'"saved_index"' in place.head(64):
        asked = (_SAVED_INDEX, *asked)
    if _PART_NAME.search("\n".join(place.names)):
        asked = (PARTS, *asked)
    # third parties are asked only about what no built-in knows: the scan for entry points is slow
    return (
        _surest(place, asked)
        or _surest(place, (_GGUF,))
        or _surest(place, [n for n in FORMATS.names() if n not in builtin])
        or _unknown(place)
    )


def _left_over(place: Place) -> bool:
    """Whether the data files are what is left of a checkpoint, beside one of another format."""
    return not metadata_files(place.names) and any(
        name.endswith(".safetensors") for name in place.names
    )


def _surest(place: Place, names: Iterable[str]) -> Format | None:
    """The format that is surest; no more are imported and asked than it takes to be sure. One that
    a file is called after is asked before the others.
    """
    surest, best = 0, None
    others: list[Format] = []
    for name in names:
        try:
            one = FORMATS.get(name)
        except LookupError:
            continue
        if one is None:
            continue
        if place.file is not None and not place.file.name.endswith(getattr(one, "suffixes", ())):
            others.append(one)
        elif (sure := one.sniff(place)) > surest:
            surest, best = sure, one
            if sure == SURE:
                return best
    for one in others:
        if (sure := one.sniff(place)) > surest:
            surest, best = sure, one
    return best


def _unknown(place: Place) -> NoReturn:
    where = printable(place.path, 240)
    broken = [
        f"format {printable(b.name)} of {printable(b.distribution)} cannot be loaded: "
        f"{printable(b.error)}"
        for b in FORMATS.broken
    ]
    if place.file is not None:
        notes = (f"it starts with {ascii(place.head())[1:]}", *broken)
        fail("M917", f"{where}: not a checkpoint in a known format", notes=notes)
    held = f"it holds {listed(list(place.names), 8)}" if place.names else "it is empty"
    notes = (held, *broken)
    fail("M917", f"{where}: this folder contains no checkpoint", notes=notes, help=_hint(place))


def _hint(place: Place) -> str | None:
    """Names the sub-folders that hold weights; of an empty prefix of a store what to look at."""
    if not place.names and is_url(place.path):
        return "look at the spelling: a prefix is there as long as something lies below it"
    below = []
    for name in place.names[:200]:
        try:
            held = place.folder.names(name) if place.folder.is_folder(name) else ()
        except MigrateError:
            continue
        if any(map(stays_behind, held)):
            below.append(name)
    return f"there are weights in {listed(below, 5)}" if below else None


class _ThirdParty:
    """A third party's format, whose `describe` is not given what it does not name: without `ranks`
    there is one set of files, without `tree` they hold tensors alone. It may still call `tree` by
    its old name, `rest`.
    """

    def __init__(self, format: Any) -> None:
        self._format = format
        parameters = inspect.signature(format.describe).parameters.values()
        self._named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._format, name)

    @property
    def holds_trees(self) -> bool:
        """Whether an output in it holds more than tensors."""
        return not self._named.isdisjoint(("tree", "rest"))

    def describe(
        self,
        specs: Mapping[str, Any],
        *,
        ranks: Any = None,
        tree: TargetTree | None = None,
        **others: Any,
    ) -> Target:
        if "ranks" in self._named:
            others["ranks"] = ranks
        elif ranks is not None or "@" in "".join(specs):
            self._refuse(f"what each of {plural(len(by_rank(specs)), 'rank')} has")
        if self.holds_trees:
            others["tree" if "tree" in self._named else "rest"] = tree
        elif tree is not None and tree.passed_through:
            self._refuse(f"{plural(len(tree.passed_through), 'tensor')} beside the weights")
        made: Target = self._format.describe(specs, **others)
        if tree is None or self.holds_trees:
            return made
        from .safetensors import items_text

        if items_text(tree, specs) is None:
            return made
        lost = "what stands beside the tensors"
        note = f"{self.name} holds tensors alone: {lost} is left out"
        return replace(made, notes=(*made.notes, note), lost=(*made.lost, lost))

    def _refuse(self, what: str) -> NoReturn:
        fail(
            "M916",
            f"the format {printable(self.name)} has no place for {what}",
            help=f"write another format: {option('output_format', 'safetensors')}",
        )


def as_saved(source: Source, name: str) -> tuple[Source, list[str]]:
    """The source as if it had been saved in the format `name`, and what its tree loses by that: as
    it is and nothing where that format loses nothing. It is closed with the source.
    """
    saved = _saved_tree(name)
    # Megatron's may be of a release that says less beside the model
    if saved is None or source.format == name == _DCP:
        return source, []
    from ._dcpentries import as_saved

    found = copy(source)
    found.index, lost = as_saved(source.index, saved)
    if name == _TORCH_DIST and source.index.tree is None:
        from ._torchdistwrite import items_beside

        specs = {key: at.spec for key, at in source.index.tensors.items()}
        found.index = replace(found.index, items={**found.index.items, **items_beside(specs)})
    return found, lost


def tree_as_saved(
    tree: TargetTree, name: str
) -> tuple[Sequence[FileTree], Mapping[int, str], Mapping[str, str]]:
    """The trees of an output as they are read again in the format `name`, the keys of their tensors
    by the records' identity, and of each key what it is in `tree`.
    """
    saves = _saved_tree(name)
    saved = saves(tree.parts[0], tree.names) if saves is not None and len(tree.parts) == 1 else None
    if saved is not None:
        return (saved.part,), saved.names, saved.origins
    return tree.parts, tree.names, {key: key for key in tree.names.values()}


def _saved_tree(name: str) -> Callable[[FileTree, Mapping[int, str]], SavedTree | None] | None:
    """What says what becomes of a tree in a format that does not give it back as it is."""
    if name == _DCP:
        from ._dcpentries import saved_tree
    elif name == _TORCH_DIST:
        from ._torchdistwrite import saved_tree
    else:
        return None
    return saved_tree


def fit_grid(asked: AskedGrid, specs: Mapping[str, Any], root: Any) -> WrittenGrid:
    """The grid that an output of these tensors has, as it is `asked`; `root` is what stands around
    them in a file. M929 where they cannot be cut so.
    """
    from ._partswrite import fit

    ranks = by_rank(specs)
    return fit(asked, {short: specs[key] for key, short in ranks[0]}, len(ranks), root)


def roots_of_grid(grid: WrittenGrid, specs: Mapping[str, Any]) -> Callable[[Any, int, int], Any]:
    """What makes the root of a part of the grid out of that of a part of another one: by the first
    part's root, the tensor-parallel rank and the number among its parts.
    """
    from ._partswrite import roots_of

    return roots_of(grid, specs)


def without_distributed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values beside a model, as JSON, without those that Megatron's distributed format adds to
    them by itself.
    """
    from ._torchdistkeys import without_usual

    return without_usual(values)


def describe_entries() -> DescribedEntries:
    """Stands for the format `dcp` where nothing is written, and keeps what it would consist of."""
    from ._dcpdescribed import DescribedEntries

    return DescribedEntries()


def is_foreign(name: str, *, writes: bool = False) -> bool:
    """Whether a format of this name is a third party's, and one that loads and `writes`."""
    if name in FORMATS.builtin() or name not in FORMATS.names():
        return False
    if not writes:
        return True
    try:
        return hasattr(FORMATS.get(name), "describe")
    except BrokenEntryError:
        return False


def foreign_endings() -> dict[str, str]:
    """What files of third parties' formats that write end in, and the format's name."""
    return {
        ending: name
        for name in FORMATS.names()
        if is_foreign(name, writes=True)
        for ending in getattr(FORMATS.get(name), "suffixes", ())
    }


def get(name: str) -> Format:
    """The format to write called `name`, by its module's name or its own; KeyError without one.
    M115 for a third party's that cannot be loaded, or that only reads.
    """
    module = {"torch": "torchzip"}.get(name, name)
    try:
        found = FORMATS.get(module)
    except BrokenEntryError as error:
        fail(
            "M115",
            f"format `{printable(name)}` cannot be loaded: {printable(str(error))}",
            help="update or remove that package",
        )
    if found is None:
        raise KeyError(name)
    if module in FORMATS.builtin():
        return found
    if not hasattr(found, "describe"):
        fail(
            "M115",
            f"the format {printable(name)} is only read",
            help=f"write another one: {option('output_format', 'safetensors')}",
        )
    return _ThirdParty(found)


def holds_trees(name: str) -> bool:
    """Whether an output in the format called `name` can hold more than tensors."""
    return not is_foreign(name, writes=True) or _ThirdParty(FORMATS.get(name)).holds_trees
