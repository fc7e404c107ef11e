"""The values beside the model of a checkpoint as one JSON object, which rules patch as they patch a
side file, and the tree with the values that such an object has.

What JSON can say and give back is in the object: plain values, lists, dicts with text keys, the
fields of `args` (a Namespace of argparse), and by their names dtypes (`torch.bfloat16`) and members
of enums (`megatron.core.enums.ModelType.encoder_or_decoder`). Everything else stands in the tree as
it is, and no patch reaches it: tensors, other containers, the model, optimizers, what is kept by
part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ..core.errors import fail, printable
from .by_part import PARTS, is_optimizer, without_keys
from .pickle.nodes import JSON_SCALARS, Call, Global
from .pickle.settings import ENUMS
from .pickle.torch_objects import CONSTANTS
from .pickle.tree import Constant, DictNode, ListNode
from .tree import FileTree

# values of a root that are a Namespace where they are made anew
ARGS = "args"
NAMESPACE = "Namespace"
# where tensors stand once values stand beside them
MODEL = "model"
_DEEPEST = 50
HIDDEN = object()
_MEMBERS = {
    f"{module}.{name}.{called}": (module, name, value)
    for (module, name), members in ENUMS.items()
    for value, called in members.items()
}


def values_of(part: FileTree) -> dict[str, Any] | None:
    """The JSON object of a part's values; None where the tensors that rules work on are all."""
    if part.at == () or type(part.root) is not DictNode:
        return None
    return {
        key: made
        for key, value in part.root.pairs
        if _is_seen(key, value, part) and (made := _said(value, 0, key == ARGS)) is not HIDDEN
    }


def _is_seen(key: Any, value: Any, part: FileTree) -> bool:
    inner = part.at is not None and key == part.at[0]
    return type(key) is str and not inner and key != PARTS and not is_optimizer(key, value)


def _said(value: Any, depth: int, args: bool = False) -> Any:
    """A value as JSON; HIDDEN if that could not be given back."""
    kind = type(value)
    if kind is str:
        return HIDDEN if _read(value) is not value else value
    if kind in JSON_SCALARS:
        return value
    if kind is Constant:
        text = _text(value)
        return HIDDEN if text is None else text
    if depth > _DEEPEST:
        return HIDDEN
    if kind is ListNode and value.kind == "list":
        items = [_said(item, depth + 1) for item in value.items]
        return HIDDEN if any(item is HIDDEN for item in items) else items
    if kind is DictNode and value.kind == (NAMESPACE if args else "dict"):
        if any(type(key) is not str for key, _ in value.pairs):
            return HIDDEN
        held = ((key, _said(item, depth + 1)) for key, item in value.pairs)
        return {key: item for key, item in held if item is not HIDDEN}
    return HIDDEN


def _text(value: Constant) -> str | None:
    """The full name of a dtype or of a member of an enum."""
    if value.kind == "dtype":
        return f"torch.{value.text}"
    function = value.node.function if value.kind == "enum" else None
    named = value.text.rpartition(".")[2]
    return None if function is None else f"{function.module}.{function.name}.{named}"


def _read(text: str) -> Any:
    """The value that a text is the full name of; the text itself if it is none."""
    if text.startswith("torch.") and (known := CONSTANTS.get(("torch", text[6:]))):
        return Constant(*known, Global("torch", text[6:])) if known[0] == "dtype" else text
    member = _MEMBERS.get(text)
    if member is None:
        return text
    module, name, value = member
    call = Call("reduce", Global(module, name), (value,))
    return Constant("enum", f"{name}.{text.rpartition('.')[2]}", call)


def with_values(
    part: FileTree, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> FileTree:
    """The part with the values that are `after` where they were `before`, as `values_of` gives
    them. Of a part that is nothing but its tensors they make a root around these, and where none
    are to be left of such a root it goes. M513 for a place that holds what JSON does not say.
    """
    if part.at == () or type(part.root) is not DictNode:
        if not after or type(part.root) is not DictNode:
            return part
        made = tuple((key, _made(value, key == ARGS)) for key, value in after.items())
        return part._replace(root=DictNode("dict", (*made, (MODEL, part.root)), None), at=(MODEL,))
    root = _edited(part.root, before or {}, after or {}, "", part)
    root = without_keys(root, before.keys() - after.keys() if before and after else before or ())
    if after is None and part.at == (MODEL,) and [key for key, _ in root.pairs] == [MODEL]:
        return part._replace(root=root.get(MODEL), at=())
    return part._replace(root=root)


def _edited(
    node: DictNode,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    path: str,
    part: FileTree | None,
) -> DictNode:
    """A dict with its values as they are `after`: what is equal stays as it is, so does what this
    part has otherwise than `before`; what is new stands where it does there, and what neither says
    stays behind what it stood behind.
    """
    args = ARGS if part is not None else None
    held = {key: value for key, value in node.pairs if type(key) is str}
    made: dict[Any, Any] = {}
    for key, value in after.items():
        own = held.get(key, HIDDEN)
        if (
            isinstance(before.get(key), Mapping)
            and isinstance(value, Mapping)
            and type(own) is DictNode
        ):
            made[key] = _edited(own, before[key], value, f"{path}{key}.", None)
        elif own is not HIDDEN and _keeps(own, before, key, value, key == args):
            made[key] = own
        else:
            if own is not HIDDEN and (key not in before or _hides(own, key == args)):
                _refuse(f"{path}{key}")
            made[key] = _made(value, key == args)
    # what is new stands before what it was put before
    ahead: dict[Any, list[Any]] = {}
    waiting: list[Any] = []
    for key in made:
        waiting.append(key)
        if key in held:
            ahead[key], waiting = waiting, []
    pairs: list[tuple[Any, Any]] = []
    for key, value in node.pairs:
        if type(key) is str and key in made:
            pairs += [(name, made[name]) for name in ahead[key]]
        elif type(key) is not str or key not in before or _stays(value, before[key]):
            pairs.append((key, value))
        elif _hides(value, key == args):
            _refuse(f"{path}{key}")
    pairs += [(name, made[name]) for name in waiting]
    return DictNode(node.kind, tuple(pairs), node.node, node.attributes)


def _keeps(own: Any, before: Mapping[str, Any], key: str, value: Any, args: bool) -> bool:
    """Whether a value stays: nothing changes it, or it is what this part has otherwise."""
    if key not in before:
        return _said(own, 0, args) is not HIDDEN
    return _same(before[key], value) or _differs(own, before[key], args)


def _stays(own: Any, said: Any) -> bool:
    """Whether a value is not removed, because this part has it otherwise; fields go together."""
    return not isinstance(said, Mapping) and _differs(own, said, args=False)


def _differs(own: Any, said: Any, args: bool) -> bool:
    """Whether a part has a value otherwise than the one that is changed."""
    mine = _said(own, 0, args)
    return mine is not HIDDEN and not _same(mine, said)


def _hides(value: Any, args: bool = False) -> bool:
    """Whether a value holds something that its JSON does not say."""
    if type(value) is DictNode and value.kind == (NAMESPACE if args else "dict"):
        return any(type(key) is not str or _hides(item) for key, item in value.pairs)
    return _said(value, 0, args) is HIDDEN


def _refuse(at: str) -> NoReturn:
    fail(
        "M513",
        f"`{printable(at, 200)}` holds what no patch can say, and one changes or removes it",
        help="patches say plain values, lists, dicts with text keys, dtypes and members of enums",
    )


def _made(value: Any, args: bool = False) -> Any:
    """The node of a JSON value."""
    if isinstance(value, str):
        return _read(value)
    if isinstance(value, Mapping):
        pairs = tuple((key, _made(item)) for key, item in value.items())
        return DictNode(NAMESPACE if args else "dict", pairs, None)
    if isinstance(value, (list, tuple)):
        return ListNode("list", tuple(map(_made, value)), None)
    return value


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)
