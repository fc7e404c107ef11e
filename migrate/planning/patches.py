"""Changes of JSON documents: patches, and what undoes them.

A patch is a merge patch (RFC 7396), several that are done in order, because merging into an object
leaves what the next one has no name for, or None, which removes the file. A merge patch cannot say
"the value was null", and its inverse often must: configurations are full of explicit nulls. So what
a stamp holds to undo a change is a list of places with the value that stood there, or none, and
with the name that followed, so that an object has its old order again. Of a file that was removed
it holds the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..rules.arguments import (
    BY,
    EACH,
    ENCODED_MODULES,
    MOST_OF,
    NULL,
    is_choice,
    is_condition,
    is_each,
)
from ..rules.compiled import holds

# of what a stamp holds; deeper, and Python's recursion ends before the document does
DEEPEST = 80
Path = tuple[str, ...]
Step = Mapping[str, Any]


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final[Any] = _Absent()


class _Null:
    def __repr__(self) -> str:
        return "null"


# what a filled patch has where null shall be written
WRITTEN_NULL: Final[Any] = _Null()


class Change(NamedTuple):
    """What stood at a place and what stands there now (or ABSENT); `next`: the name after it."""

    at: Path
    before: Any
    after: Any
    next: str | None = None


def merge_patch(target: Any, patch: Any) -> Any:
    """The target with the merge patch (RFC 7396): null removes a name, `WRITTEN_NULL` sets it to
    null, new names come last.
    """
    if not isinstance(patch, Mapping):
        return patch
    out = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        elif value is WRITTEN_NULL:
            out[name] = None
        else:
            out[name] = merge_patch(out.get(name), value)
    return out


def apply_patch(target: Any, patch: Any) -> Any:
    """What the patch of a file makes of the object in it; None is a file that is not there, ABSENT
    a patch whose condition does not hold. Names that stay keep their order.
    """
    if patch is None or patch is ABSENT:
        return target if patch is ABSENT else None
    if not isinstance(patch, (list, tuple)):
        return merge_patch(target, patch)
    made = target
    for one in patch:
        made = merge_patch(made, one)
    return _ordered(target, made)


def _ordered(before: Any, after: Any) -> Any:
    """`after`, with the names that `before` has first and in its order, on each level."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    names = [*(name for name in before if name in after), *after]
    return {name: _ordered(before.get(name), after[name]) for name in names}


def fill_patch(patch: Any, params: Mapping[str, Any], names: re.Pattern[str]) -> Any:
    """The patch with each text that is wholly `$param` replaced by its value, each choice of a list
    by what it chooses, and `$null` by null as a value; a name or item is left out whose param is
    unset, or that is an object with conditions which do not hold.
    """
    if not isinstance(patch, (list, tuple)):
        return _filled(patch, params, names)
    found = (_filled(one, params, names) for one in patch)
    return [one for one in found if one is not ABSENT]


def _filled(value: Any, params: Mapping[str, Any], names: re.Pattern[str]) -> Any:
    if isinstance(value, str) and (match := names.fullmatch(value)):
        if match[1] == NULL:
            return WRITTEN_NULL
        return params.get(match[1], ABSENT)
    if is_choice(value):
        ((name, wanted),) = value.items()
        return params[name[1:]].choose(wanted)
    if is_each(value):
        return _filled_sets(value, params, names)
    if isinstance(value, Mapping):
        if not holds(value, params):
            return ABSENT
        filled = {
            name: _filled(item, params, names)
            for name, item in value.items()
            if not is_condition(name)
        }
        return {name: item for name, item in filled.items() if item is not ABSENT}
    if isinstance(value, (list, tuple)):
        return [
            _without_marks(item)
            for item in (_filled(item, params, names) for item in value)
            if item is not ABSENT
        ]
    return value


def _filled_sets(
    value: Mapping[str, Any], params: Mapping[str, Any], names: re.Pattern[str]
) -> dict[str, Any]:
    wanted = value[f"${ENCODED_MODULES}"]
    sets = params[ENCODED_MODULES].sets(wanted)
    # an argument that a set has none of is unset, though a param be called so
    outer = {name: one for name, one in params.items() if name not in wanted[BY]}
    most = max(range(len(sets)), key=lambda n: len(sets[n][1]), default=0)
    out = {}
    for number, (said, chosen) in enumerate(sets):
        inner = {**outer, **said, ENCODED_MODULES: chosen}
        made = _filled(value[EACH], inner, names)
        if number == most and MOST_OF in value:
            made = _overlaid(made, _filled(value[MOST_OF], inner, names))
        out[f"group_{number}"] = made
    return out


def _overlaid(made: Any, more: Any) -> Any:
    """One filled patch with another merged into it, marks of what is removed or null included."""
    if not isinstance(made, Mapping) or not isinstance(more, Mapping):
        return made if more is ABSENT else more
    return {**made, **{name: _overlaid(made.get(name), one) for name, one in more.items()}}


def _without_marks(value: Any) -> Any:
    """An item of a list, which is written as it is and merged with nothing."""
    if value is WRITTEN_NULL:
        return None
    if isinstance(value, Mapping):
        return {name: _without_marks(held) for name, held in value.items()}
    return value


def leaves_of_patch(patch: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(place, value) of all that the patch of a file sets or removes."""
    if isinstance(patch, (list, tuple)) and not at:
        for one in patch:
            yield from leaves_of_patch(one)
        return
    if patch is ABSENT:
        return
    if not isinstance(patch, Mapping) or is_choice(patch) or is_each(patch):
        yield at, patch
        return
    for name, value in patch.items():
        if not is_condition(name):
            yield from leaves_of_patch(value, (*at, name))


def params_of_each(patch: Mapping[str, Any], value: Any) -> Iterator[tuple[Path, str]]:
    """(place, name) of each `$name` that an object for each set of values wrote into `value`, but
    for the arguments that it was made by.
    """
    by = patch[f"${ENCODED_MODULES}"][BY]
    for group in value if isinstance(value, Mapping) else ():
        for at, text in leaves_of_patch(patch[EACH]):
            if isinstance(text, str) and is_condition(text) and text[1:] not in by:
                yield (group, *at), text[1:]


def each_as_it_stands(patch: Any, value: Any, top: bool = True) -> Any:
    """The patch of a file with what stands in `value` in place of an object for each set: which
    sets there are what is stored does not always tell.
    """
    if isinstance(patch, (list, tuple)) and top:
        return [each_as_it_stands(one, value, top=False) for one in patch]
    if not isinstance(patch, Mapping) or is_choice(patch):
        return patch
    if is_each(patch):
        return {} if value is ABSENT else value
    return {
        name: one if is_condition(name) else each_as_it_stands(one, _at(value, (name,)), top=False)
        for name, one in patch.items()
    }


def asked_params(patch: Any) -> Iterator[str]:
    """The params on which objects in the patch of a file depend."""
    if isinstance(patch, (list, tuple)):
        for one in patch:
            yield from asked_params(one)
    elif is_each(patch):
        yield from asked_params(patch[EACH])
    elif isinstance(patch, Mapping) and not is_choice(patch):
        for name, value in patch.items():
            if is_condition(name):
                yield name[1:]
            else:
                yield from asked_params(value)


def conditions_met(patch: Any, value: Any, at: Path = ()) -> Iterator[tuple[Path, str, Any]]:
    """(place, param, what is asked of it) of each condition on one value whose object stands in
    `value`, with all that the patch of a file writes there whatever the params.
    """
    if isinstance(patch, (list, tuple)) and not at:
        for one in patch:
            yield from conditions_met(one, value)
        return
    if not isinstance(patch, Mapping) or not isinstance(value, Mapping):
        return
    if is_choice(patch) or is_each(patch):
        return
    asked = {name[1:]: wanted for name, wanted in patch.items() if is_condition(name)}
    written = list(_constants(patch)) if asked else []
    if written and all(same_json(_at(value, place), wanted) for place, wanted in written):
        for param, wanted in asked.items():
            if not isinstance(wanted, (list, tuple)):
                yield at, param, wanted
    for name, held in patch.items():
        if not is_condition(name):
            yield from conditions_met(held, value.get(name), (*at, name))


def _constants(patch: Mapping[str, Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(place, value) of what an object of a patch writes where its own conditions hold."""
    for name, value in patch.items():
        if is_condition(name) or is_choice(value) or is_each(value) or value is None:
            continue
        if isinstance(value, Mapping):
            if not any(map(is_condition, value)):
                yield from _constants(value, (*at, name))
        elif not is_condition(value):
            yield (*at, name), value


def _at(value: Any, place: Path) -> Any:
    for name in place:
        value = value.get(name, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


def list_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], at: Path = ()
) -> list[Change]:
    """What differs between two objects, in the order of `before`, then what is new; as few and as
    deep places as there are.
    """
    out = []
    names = list(before)
    for name, following in zip(names, [*names[1:], None], strict=False):
        now = after.get(name, ABSENT)
        if isinstance(before[name], Mapping) and isinstance(now, Mapping):
            out += list_changes(before[name], now, (*at, name))
        elif now is ABSENT or not same_json(before[name], now):
            out.append(Change((*at, name), before[name], now, following))
    return out + [
        Change((*at, name), ABSENT, value) for name, value in after.items() if name not in before
    ]


def account(
    path: str, old: Mapping[str, Any] | None, now: Mapping[str, Any] | None, leg: str
) -> dict[str, Any]:
    """What became of a file on the step called `leg`, for the plan."""
    rows: list[dict[str, Any]] = []
    for change in list_changes(old or {}, now or {}):
        row: dict[str, Any] = {"at": ".".join(change.at)}
        if change.before is not ABSENT:
            row["before"] = change.before
        if change.after is not ABSENT:
            row["after"] = change.after
        rows.append(row)
    kind = "added" if old is None else "removed" if now is None else "changed"
    return {
        "path": path,
        "change": kind,
        "leg": leg,
        "changes": rows,
    }


def decides(patch: Any, keys: Sequence[str]) -> bool:
    """Whether the patch of a file decides the value at `keys`."""
    if isinstance(patch, (list, tuple)):
        return any(decides(one, keys) for one in patch)
    for key in keys:
        if not isinstance(patch, Mapping) or is_choice(patch) or is_each(patch):
            return True
        if key not in patch:
            return False
        patch = patch[key]
    return True


def undo_steps(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, text: str | None = None
) -> list[dict[str, Any]]:
    """What makes `before` of `after`, as a stamp holds it; None is a file that is not there.

    A step has `at` and, of what was there, `was` and, if it was removed, the name that was `next`.
    A step whose `at` is empty says that the file was not there or, with the `text` that was in it,
    that it was removed.
    """
    if after is None and text is not None:
        return [{"at": [], "was": text}]
    out: list[dict[str, Any]] = [{"at": []}] if before is None else []
    for change in list_changes(before or {}, after or {}):
        step: dict[str, Any] = {"at": list(change.at)}
        if change.before is not ABSENT:
            step["was"] = change.before
            if change.after is ABSENT and change.next is not None:
                step["next"] = change.next
        out.append(step)
    return out


def removed_text(steps: Sequence[Step]) -> str | None:
    """What stood in a file that was removed; None of one that was changed or begun."""
    return next((step["was"] for step in steps if not step["at"] and "was" in step), None)


def restore_value(value: Mapping[str, Any], steps: Sequence[Step]) -> dict[str, Any] | None:
    """The object as it was before what `steps` undo; None if it was not there and nothing remains.

    A place whose parent is gone stays gone.
    """
    root: dict[str, Any] = {"": dict(value)}
    for step in reversed(steps):
        if not step["at"]:
            return root[""] or None
        path, name = ["", *step["at"][:-1]], step["at"][-1]
        parent: Any = root
        for part in path:
            below = parent.get(part)
            if not isinstance(below, dict):
                parent = None
                break
            parent[part] = parent = dict(below)
        if parent is None:
            continue
        if "was" not in step:
            parent.pop(name, None)
        elif name in parent or step.get("next") not in parent:
            parent[name] = step["was"]
        else:
            items = list(parent.items())
            parent.clear()
            for known, item in items:
                if known == step["next"]:
                    parent[name] = step["was"]
                parent[known] = item
    restored: dict[str, Any] = root[""]
    return restored


def is_undo(steps: Any) -> bool:
    """Whether it is what `undo_steps` makes: a stamp is the checkpoint's and not trusted."""
    if json_depth(steps) > DEEPEST:
        return False
    return isinstance(steps, list) and all(
        isinstance(step, dict)
        and isinstance(step.get("at"), list)
        and all(isinstance(name, str) for name in step["at"])
        and isinstance(step.get("next", ""), str)
        and (bool(step["at"]) or isinstance(step.get("was", ""), str))
        for step in steps
    )


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1, 1.0 and true differ, order of names does not count."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            same_json(value, other[name]) for name, value in one.items()
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_json, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def json_depth(value: Any) -> int:
    """How many containers are nested in each other."""
    level, here = 0, [value]
    while here := [value for value in here if isinstance(value, (dict, list))]:
        level += 1
        here = [
            item
            for value in here
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    return level


def dump_json(value: Any, like: str | None = None) -> bytes:
    """The value as JSON, in order, in the indentation, ASCII and last line of `like`; without it as
    Hugging Face writes it.
    """
    if like is None:
        return (json.dumps(value, indent=2) + "\n").encode()
    if like.strip() == "{}":
        # an empty object has no style
        like = dump_json({"": 0}).decode().rstrip("\n") + "\n" * like.endswith("\n")
    indented = re.match(r'\{\r?\n([ \t]+)"', like)
    separators = (",", ":") if not indented and ": " not in like and len(like) > 2 else None
    made = json.dumps(
        value,
        indent=indented[1] if indented else None,
        separators=separators,
        ensure_ascii=like.isascii(),
    )
    return (made + "\n" * like.endswith("\n")).encode("utf-8", "surrogatepass")
