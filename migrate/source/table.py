"""Which dict of a nested checkpoint rules work on: the one that `--at` names, else the one that the
tree leaves no choice about.

A training script has its weights under a usual name, or nothing else in its file looks like a state
dict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import fail, listed, option, plural, printable
from .nesting import flatten, values_below
from .pickle.tree import (
    OBJECTS,
    Composite,
    DictNode,
    ListNode,
    TensorRecord,
    holders,
    segment,
)
from .tree import (
    NODES,
    TENSORS,
    FileTree,
    dict_at,
    integer_item,
    is_flat,
    is_object,
    is_state,
    item_at,
    replace_dict,
    tensor_records,
)

if TYPE_CHECKING:
    from .index import Index

_OWN = frozenset({TensorRecord, Composite})
# where training scripts and their frameworks put the weights
USUAL = ("state_dict", "model", "model_state_dict", "module", "net", "weights")


def choose_table(  # noqa: RET503 - what fails does not return
    root: Any, at: str | None, label: str
) -> tuple[str, ...] | None:
    """The path of the dict that rules work on; None where no dict of text keys has tensors.

    M945 if `at` leads to none, or if several could be meant.
    """
    found = _candidates(root)
    if at in (None, "", ".") and () not in found and model_at_root(root):
        return ()
    if at is not None:
        path = _given(root, at)
        if path is None or (found and path not in found and not _workable(dict_at(root, path))):
            held = (
                f"there is {listed([_shown(p) for p in found], 8)}"
                if found
                else "the file has no dict of tensors by name"
            )
            what = f"{label}: no dict of tensors by name is at `{printable(at)}`"
            way = f"leave {option('at')} out, or name one of these"
            if path is None and _given(root, f"{at}.0") is not None:
                way = f"it is a list: {option('at', f'{at}.0')} is the first dict in it"
            fail("M945", what, notes=(held,), help=way)
        return path
    usual: list[tuple[str, ...]] = [path for path in found if len(path) == 1 and path[0] in USUAL]
    homes = usual or [
        path for path in dict.fromkeys(path[:1] for path in found) if path and path[0] in USUAL
    ]
    if len(homes) == 1 and _workable(dict_at(root, homes[0])):
        return homes[0]
    if len(found) <= 1:
        path = next(iter(found), None)
        if path and type(root) is DictNode:
            own = {key for key, value in root.pairs if type(value) is TensorRecord}
            table = dict_at(root, path)
            # the model itself, and its average in a dict
            if table is not None and any(key in own for key, _ in table.pairs):
                fail(
                    "M945",
                    f"{label}: tensors of the same names are at the root and at `{_shown(path)}`",
                    help=f"say which are meant: {option('at', _shown(path))}; "
                    f"{option('at', '.')} takes all of them, with their keys joined by dots",
                )
        return path
    notes = tuple(f"{_shown(path)}: {plural(found[path], 'tensor')}" for path in list(found)[:12])
    if _workable(dict_at(root, ())):
        notes += (f"{option('at', '.')} takes them all, with their keys joined by dots",)
    raise_help = f"say which one: {option('at', _shown(max(found, key=found.__getitem__)))}"
    fail(
        "M945",
        f"{label}: {len(found)} dicts of tensors, and rules work on one",
        notes=notes,
        help=raise_help,
    )


def flatten_table(part: FileTree, label: str) -> FileTree:
    """The part with a flat dict in place of the nested one that rules work on; as it is where that
    is flat. M945 if it cannot be.
    """
    table = part.table
    if (
        table is None
        or is_flat(table)
        or (not part.at and model_at_root(table))
        or not _workable(table)
    ):
        return part
    made, nests = flatten(table, label)
    return part._replace(root=replace_dict(part.root, table, made), nested_dicts=nests)


def model_at_root(root: Any) -> bool:
    """Whether the tensors of a model stand at the root itself, as torchtitan saves them: beside the
    state of its optimizer, or beside counters.

    What else holds tensors there has counters only: tensors without dimensions.
    """
    if type(root) is not DictNode:
        return False
    weights = beside = False
    for key, value in root.pairs:
        kind = type(value)
        if type(key) is not str:
            return False
        if kind is TensorRecord:
            weights = weights or bool(value.shape)
        elif kind is Composite:
            weights = True
        elif (kind is DictNode or kind is ListNode) and not is_object(key, value):
            for record in tensor_records([value]):
                beside = True
                if "optim" in key.lower():
                    break
                if record.shape or key in USUAL:
                    return False
    return weights and beside


def tensors_at_root(root: Any) -> str | None:
    """That tensors stand at the root, and which entries keep rules from working on them without a
    word; None where there is nothing of this.
    """
    pairs = root.pairs if type(root) is DictNode else ()
    if not any(type(key) is str and type(value) in _OWN for key, value in pairs):
        return None
    beside = [
        segment(key)
        for key, value in pairs
        if type(value) in NODES
        and not is_object(key, value)
        and next(tensor_records([value]), None) is not None
    ]
    if not beside:
        return None
    return (
        f"tensors stand at the root, beside {listed(beside, 4)} with tensors as well: rules work "
        f"on those at the root with {option('at', '.')}"
    )


def refuse_without_table(index: Index) -> NoReturn:
    """M945 for rules that see none of the tensors that the checkpoint has."""
    roots = [] if index.tree is None else [part.root for part in index.tree.parts]
    why = next(filter(None, map(tensors_at_root, roots)), None)
    fail(
        "M945",
        f"rules work on one dict of tensors by name, and none of the checkpoint's "
        f"{plural(len(index.passed_through), 'tensor')} is in one that is found by itself",
        notes=() if why is None else (why,),
        help=f"name the dict: {option('at', 'PATH')}, or {option('at', '.')} for the root",
    )


def _workable(node: DictNode | None) -> bool:
    """Whether rules can work on this dict: flat, or of dicts in which all tensors have names."""
    if is_flat(node):
        return True
    held = values_below(node)
    return held is not None and is_flat(
        DictNode("dict", tuple((str(number), value) for number, value in enumerate(held)), None)
    )


def _given(root: Any, at: str) -> tuple[str, ...] | None:
    """The path that `at` spells: keys and places in lists with dots between. A text key may hold
    dots itself, and an integer is written in decimal.
    """
    if at in ("", "."):
        return () if type(root) is DictNode and root.kind not in OBJECTS else None
    pending: list[tuple[Any, tuple[str, ...], str]] = [(root, (), at)]
    while pending:
        here, path, rest = pending.pop()
        held: Iterable[tuple[Any, Any]] = here.pairs if type(here) is DictNode else ()
        name = rest.partition(".")[0]
        if type(here) is ListNode:
            held = ((name, item_at(here, name)),)
        elif type(here) is DictNode and (item := integer_item(here, name)) is not None:
            held = (*held, (name, item))
        for key, value in held:
            kind = type(value)
            if type(key) is not str or not rest.startswith(key) or kind not in NODES:
                continue
            if rest == key:
                if kind is DictNode and value.kind not in OBJECTS:
                    return (*path, key)
            elif rest[len(key)] == "." and key:
                pending.append((value, (*path, key), rest[len(key) + 1 :]))
    return None


def _shown(path: tuple[str, ...]) -> str:
    return printable(".".join(path)) if path else "."


def _candidates(root: Any) -> dict[tuple[str, ...], int]:
    """The paths of flat dicts of tensors with how many they hold, none of them in the state of an
    optimizer; one dict counts once.
    """
    out: dict[tuple[str, ...], int] = {}
    seen: set[int] = set()
    holding = holders(root, TENSORS)
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while stack:
        node, path = stack.pop()
        if type(node) is not DictNode or id(node) in seen:
            continue
        seen.add(id(node))
        if is_flat(node, holding):
            out[path] = sum(
                type(value) is TensorRecord or type(value) is Composite for _, value in node.pairs
            )
            continue
        stack += [
            (value, (*path, key))
            for key, value in reversed(node.pairs)
            if type(key) is str and "optim" not in key.lower() and not is_state(key)
        ]
    return out
