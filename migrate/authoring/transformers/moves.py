"""Where transformers puts each key of a checkpoint, and how that depends on the numbers in it.

Its patterns are searched, one after the other, and ask the model whether a name exists. They are
not read here: keys are pushed through them. A key goes once as it is, which tells where it belongs,
and each kind of key once more with other numbers, which tells what the new name does with them: the
number itself, the number and an offset, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

# whole segments, and what follows an underscore at the end of a segment
_NUMBER = re.compile(r"(?:(?<![^.])|(?<=_))(?:0|[1-9][0-9]*)(?![^.])")
_DIGITS = re.compile(r"[0-9]+")
# numbers that no model has, far enough from each other to tell an offset
_STEP, _REACH = 1_000_000, 1_000


class Numeral(NamedTuple):
    """A number in a name: the number of the key at this position, and an offset."""

    position: int
    offset: int = 0


Name = tuple["str | Numeral", ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """What becomes of one key: `source` and `target` are its names with slots for the numbers that
    may be others. `pattern` is the source pattern of the converter that takes it, if one does.
    """

    key: str
    source: Name
    numbers: tuple[int, ...]
    renamed: str
    target: Name
    pattern: str | None


class _Seen(Mapping[str, Any]):
    """The model's names, asked with the numbers of a probe for those of the key."""

    def __init__(self, names: Mapping[str, Any], numbers: Mapping[int, int]) -> None:
        self.names, self.numbers = names, numbers

    def plain(self, name: str) -> str:
        return _DIGITS.sub(lambda m: str(_near(int(m[0]), self.numbers)), name)

    def get(self, name: str, default: Any = None) -> Any:
        return self.names.get(self.plain(name), default)

    def __getitem__(self, name: str) -> Any:
        return self.names[self.plain(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.plain(name) in self.names

    def __iter__(self) -> Any:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _near(number: int, numbers: Mapping[int, int]) -> int:
    probe = (number + _STEP // 2) // _STEP * _STEP
    if abs(number - probe) > _REACH or probe not in numbers:
        return number
    return numbers[probe] + number - probe


Rename = Callable[[str, Mapping[str, Any]], "tuple[str, str | None]"]


def renaming(held: Any, transforms: Sequence[Any], base: str) -> Rename:
    """The way that `from_pretrained` gives a key its name, for any names of a model."""
    renamings = [t for t in transforms if isinstance(t, held.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, held.WeightConverter)]
    rename = held.rename_source_key

    def renamed(key: str, names: Mapping[str, Any]) -> tuple[str, str | None]:
        found, pattern = rename(key, renamings, converters, base, names)
        if found not in names and key in names:
            found, pattern = rename(key, [], [], base_model_prefix=base, meta_state_dict=names)
        return found, pattern

    return renamed


def moves(keys: Iterable[str], names: Mapping[str, Any], renamed: Rename) -> list[Moved]:
    """What becomes of each key, in the order given."""
    known: dict[tuple[str, ...], list[tuple[frozenset[int], Name]]] = {}
    out = []
    for key in keys:
        found, pattern = renamed(key, names)
        texts, numbers = split(key)
        kinds = known.setdefault(texts, [])
        for known_free, target in kinds:
            if filled(target, numbers) == found:
                free = known_free
                break
        else:
            free, target = _generalised(texts, numbers, found, names, renamed)
            kinds.append((free, target))
        source = _joined(texts, numbers, free)
        out.append(Moved(key, source, numbers, found, target, pattern))
    return out


def split(key: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts around the numbers of a key, and the numbers."""
    return tuple(_NUMBER.split(key)), tuple(int(n) for n in _NUMBER.findall(key))


def _generalised(
    texts: tuple[str, ...],
    numbers: tuple[int, ...],
    found: str,
    names: Mapping[str, Any],
    renamed: Rename,
) -> tuple[frozenset[int], Name]:
    """The numbers that may be others, as many as possible, and the new name with slots."""
    places = range(len(numbers))
    for size in range(len(numbers), -1, -1):
        for free in combinations(places, size):
            probes = {i: (i + 1) * _STEP for i in free}
            key = _written(texts, [probes.get(i, n) for i, n in enumerate(numbers)])
            back = {probes[i]: numbers[i] for i in free}
            other, _ = renamed(key, _Seen(names, back))
            target = _slots(other, {probes[i]: i for i in free})
            if filled(target, numbers) == found:
                return frozenset(free), target
    return frozenset(), (found,)


def _slots(name: str, probes: Mapping[int, int]) -> Name:
    out: list[str | Numeral] = []
    end = 0
    for match in _DIGITS.finditer(name):
        number = int(match[0])
        probe = (number + _STEP // 2) // _STEP * _STEP
        if probe in probes and abs(number - probe) <= _REACH:
            out += [name[end : match.start()], Numeral(probes[probe], number - probe)]
            end = match.end()
    return tuple(part for part in [*out, name[end:]] if part != "")


def filled(name: Name, numbers: Sequence[int]) -> str:
    """The name with these numbers in its slots."""
    return "".join(
        part if isinstance(part, str) else str(numbers[part.position] + part.offset)
        for part in name
    )


def _written(texts: Sequence[str], numbers: Sequence[int]) -> str:
    out = [texts[0]]
    for number, text in zip(numbers, texts[1:], strict=True):
        out += [str(number), text]
    return "".join(out)


def _joined(texts: Sequence[str], numbers: Sequence[int], free: frozenset[int]) -> Name:
    out: list[str | Numeral] = [texts[0]]
    for i, text in enumerate(texts[1:]):
        if i in free:
            out += [Numeral(i), text]
        else:
            last = out.pop()
            out.append(f"{last}{numbers[i]}{text}")
    return tuple(part for part in out if part != "")
