"""Many keys as few lines: `model.layers.{0..31}.self_attn.{k,v}_proj.weight`.

Nobody reads a list of a thousand keys. Keys of one form are one line with the ranges of their
integers; lines that differ in one word, with the same integers and the same tag, become one line
with alternatives. Words are put together when they are alike (`q_proj` and `k_proj`, `w1` and `w3`,
`running_mean` and `running_var`) or few: a list of unrelated names says less than the names.

Text from a checkpoint is escaped, and its braces are doubled as in patterns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from math import prod
from typing import Final

# Unrelated words that may share a line, alternatives that are written out, lines that one irregular
# form may take.
FEW_WORDS: Final = 4
MOST_SHOWN: Final = 8
MOST_LINES: Final = 8
# Above this, the lines are too many to be read and not worth the time to merge.
MOST_FORMS: Final = 5000
# of a key, from its end: each is looked at with all the others
MOST_SEGMENTS: Final = 64


@dataclass(frozen=True, slots=True)
class Collapsed:
    """One line: its `text`, the `count` of keys it stands for, and the first of them as it is (not
    escaped).
    """

    text: str
    count: int
    sample: str


@dataclass(slots=True)
class Form:
    """Keys that differ in the integers at the segments `slots` only, with an equal tag."""

    segments: tuple[str, ...]
    slots: tuple[int, ...]
    tag: Hashable
    keys: list[str] = field(default_factory=list)
    ints: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(slots=True)
class _Line:
    """Keys that become one line, before it is written."""

    tag: Hashable
    axes: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    words: tuple[tuple[str, ...], ...]  # of each segment; none for slots
    count: int
    sample: str

    def text(self) -> str:
        numbers = iter(self.axes)
        return ".".join(_words(words) if words else _axis(next(numbers)) for words in self.words)


def merge(forms: Iterable[Form]) -> list[Collapsed]:
    """The lines for these forms, in order."""
    lines = [line for form in forms for line in _lines(form)]
    if 1 < len(lines) <= MOST_FORMS:
        # from the leaf upwards, so that {weight,bias} come together before modules do
        for back in range(1, min(max(len(line.words) for line in lines), MOST_SEGMENTS) + 1):
            lines = _merge_at(lines, back)
    return [Collapsed(line.text(), line.count, line.sample) for line in lines]


def _lines(form: Form) -> list[_Line]:
    slots = set(form.slots)
    words = tuple(() if i in slots else (segment,) for i, segment in enumerate(form.segments))
    found = _products(form.ints, len(form.slots))
    if len(found) == 1:
        return [_Line(form.tag, found[0], form.slots, words, len(form.keys), form.keys[0])]
    samples: dict[tuple[int, ...], str] = dict(
        zip(reversed(form.ints), reversed(form.keys), strict=True)
    )
    lines = []
    for axes in found:
        first = tuple(axis[0] for axis in axes)
        lines.append(_Line(form.tag, axes, form.slots, words, prod(map(len, axes)), samples[first]))
    return lines


def _products(rows: Sequence[tuple[int, ...]], width: int) -> list[tuple[tuple[int, ...], ...]]:
    """The rows as few products of sets of integers; as one that holds them all where too many would
    be needed.
    """
    if not width:
        return [()]
    axes = tuple(tuple(sorted(set(column))) for column in zip(*rows, strict=True))
    distinct = set(rows)
    if prod(map(len, axes)) == len(distinct):
        return [axes]
    pieces = products(distinct, width, MOST_LINES) if width <= MOST_SEGMENTS else [axes]
    return pieces if len(pieces) <= MOST_LINES else [axes]


def products(
    rows: Set[tuple[int, ...]], width: int, most: int | None = None
) -> list[tuple[tuple[int, ...], ...]]:
    """The rows, of `width` integers, as disjoint products of sorted sets; of more than `most`
    products not all.
    """
    if width == 1:
        return [(tuple(sorted(row[0] for row in rows)),)]
    rests: dict[int, set[tuple[int, ...]]] = {}
    for row in sorted(rows):
        rests.setdefault(row[0], set()).add(row[1:])
    alike: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for number, rest in rests.items():
        alike.setdefault(frozenset(rest), []).append(number)
    out = []
    for remaining, numbers in alike.items():
        out += [(tuple(numbers), *axes) for axes in products(remaining, width - 1, most)]
        if most is not None and len(out) > most:
            break
    return out


def _merge_at(lines: list[_Line], back: int) -> list[_Line]:
    """Puts lines together that differ in the segment `back` from the end only."""
    alike: dict[Hashable, list[int]] = {}
    for number, line in enumerate(lines):
        i = len(line.words) - back
        if i >= 0 and line.words[i]:
            others = (line.tag, line.axes, line.words[:i], line.words[i + 1 :])
            alike.setdefault(others, []).append(number)
    gone = set()
    for numbers in alike.values():
        if len(numbers) < 2:
            continue
        i = len(lines[numbers[0]].words) - back
        for family in _families([lines[n].words[i] for n in numbers]):
            first, *rest = (numbers[at] for at in family)
            line = lines[first]
            for other in rest:
                line.words = (
                    *line.words[:i],
                    (*line.words[i], *lines[other].words[i]),
                    *line.words[i + 1 :],
                )
                line.count += lines[other].count
                gone.add(other)
    return [line for number, line in enumerate(lines) if number not in gone]


def _families(words: Sequence[tuple[str, ...]]) -> list[list[int]]:
    """The positions in `words`, those together that belong on one line."""
    left = list(range(len(words)))
    out = []
    for kin in (_stem, _suffix, _prefix):
        found: dict[str, list[int]] = {}
        for at in left:
            relation = {kin(word) for word in words[at]}
            found.setdefault(relation.pop() if len(relation) == 1 else "", []).append(at)
        out += [family for name, family in found.items() if name and len(family) > 1]
        taken = {at for family in out for at in family}
        left = [at for at in left if at not in taken]
    few = sum(len(words[at]) for at in left) <= FEW_WORDS
    return sorted([*out, left] if few and left else [*out, *([at] for at in left)])


def _stem(word: str) -> str:
    stem = word.rstrip("0123456789")
    number = word[len(stem) :]
    return stem if number and (number[0] != "0" or number == "0") else ""


def _suffix(word: str) -> str:
    head, bar, tail = word.rpartition("_")
    return bar + tail if head and tail else ""


def _prefix(word: str) -> str:
    head, bar, tail = word.partition("_")
    return head + bar if head and tail else ""


def _words(words: Sequence[str]) -> str:
    if len(words) == 1:
        return _safe(words[0])
    stem = _stem(words[0])
    if stem and all(_stem(word) == stem for word in words):
        return _safe(stem) + _axis(tuple(sorted(int(word[len(stem) :]) for word in words)))
    # cut at an underscore: {k,v}_proj, but {gamma,beta} and not {gamm,bet}a
    prefix = _common(words)
    prefix = prefix[: prefix.rfind("_") + 1]
    suffix = _common([word[len(prefix) :][::-1] for word in words])[::-1]
    suffix = suffix[suffix.find("_") :] if "_" in suffix else ""
    middle = [_safe(word[len(prefix) : len(word) - len(suffix)]) for word in words]
    return f"{_safe(prefix)}{{{_shortened(middle)}}}{_safe(suffix)}"


def _common(words: Sequence[str]) -> str:
    """What all the words begin with."""
    return "".join(
        c for c, *_ in takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False))
    )


def _axis(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    if len(numbers) > 3 and step > 1 and all(b - a == step for a, b in pairwise(numbers)):
        return f"{{{numbers[0]}..{numbers[-1]}..{step}}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = []
    for a, b in runs:
        texts += [f"{a}..{b}"] if b > a + 1 else [str(a)] if a == b else [str(a), str(b)]
    return f"{{{_shortened(texts)}}}"


def _shortened(texts: Sequence[str]) -> str:
    if len(texts) > MOST_SHOWN:
        texts = [*texts[: MOST_SHOWN // 2], "…", texts[-1]]
    return ",".join(texts)


def _safe(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        text = ascii(text)[1:-1]
    return text.replace("{", "{{").replace("}", "}}")
