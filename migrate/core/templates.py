"""Keys grouped by form, so that a pattern is matched once per form and not once per key.

A hundred thousand keys have some dozen forms: they differ in the integers that are whole segments.
Those become slots. A pattern is matched against the form, each slot an atom that an integer capture
takes or that stands inside the text of another capture; the values of the single keys are then
filled in column by column.

The result is the same as matching key by key. Where it could differ (a pattern with literal digits
may take part of a slot; an index expression may rule out one of two readings), `bind` says PER_KEY
and the caller does that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, pairwise, repeat, takewhile
from math import prod
from operator import itemgetter
from typing import Final, Literal

from .errors import listed
from .keys import Pattern, TwoReadings
from .matching import LONGEST_INT, Integer, Taking, Value, advance, cuts, ways
from .matching import Literal as LiteralPart
from .notation import DIGITS

# A private-use character; a key that holds it itself is a template of its own.
SLOT: Final = "\ue000"

# What decides whether a run of digits is a canonical integer: where it is, how long, and whether it
# begins with 0. Bytes, because their translation is ten times faster than that of text.
_SHAPE: Final = bytes.maketrans(b"123456789", b"1" * 9)


class _PerKey(Enum):
    PER_KEY = "per key"


PER_KEY: Final = _PerKey.PER_KEY

Row = tuple[Value, ...]


# Everything but digits becomes a space, so that `split` finds the runs of digits.
_DIGITS_ALONE: Final = bytes(c if c in b"0123456789" else 32 for c in range(256))
_RUN: Final = re.compile("[0-9]+")
# integers that are taken out at once: those of a million keys would double what a plan takes
_AT_ONCE: Final = 1 << 14


@dataclass(slots=True, eq=False)
class Template:
    """One form of keys: `text` with SLOT for each whole-segment integer, the `keys` in order, and
    the `ints` of each key, which are read when they are first asked for.

    literal: the one key holds the character SLOT itself, and its text has no slots.
    """

    text: str
    keys: list[str] = field(default_factory=list)
    known: list[tuple[int, ...]] | None = None
    literal: bool = False

    @property
    def ints(self) -> list[tuple[int, ...]]:
        """The integers of each key."""
        if self.known is None:
            if self.literal or SLOT not in self.text:
                self.known = [()] * len(self.keys)
            else:
                self.known = _integers(self.text, self.keys)
        return self.known


def _integers(text: str, keys: Sequence[str]) -> list[tuple[int, ...]]:
    """The integers in the slots of the template `text`, of each key.

    Digits that are no slots stand in the same places of all keys, and what is around a slot is no
    digit: so slots are the same runs of digits in each key.
    """
    *pieces, last = text.split(SLOT)
    slots, runs = list[int](), 0
    for piece in pieces:
        runs += len(_digits(piece))
        slots.append(runs)
        runs += 1
    runs += len(_digits(last))
    at_once = max(1, _AT_ONCE // runs)
    out: list[tuple[int, ...]] = []
    for start in range(0, len(keys), at_once):
        digits = _digits(" ".join(keys[start : start + at_once]))
        number_of = {run: int(run) for run in set(digits)}
        numbers = list(map(number_of.__getitem__, digits))
        out += zip(*[numbers[slot::runs] for slot in slots], strict=True)
    return out


def _digits(text: str) -> list[bytes]:
    """The runs of digits in a text."""
    return text.encode("utf-8", "surrogatepass").translate(_DIGITS_ALONE).split()


@dataclass(slots=True)
class _DigitShape:
    """What all keys with the same digits-blind text share: where their slots are, and what takes
    keys into their template if it is one only; if it is not, because of digits that are no slots,
    as those of a rank, `several` has that by the `rest` of a key's digits.
    """

    borders: tuple[int, ...]
    rest: Callable[[str], Hashable]
    one: Callable[[str], None] | None = None
    several: dict[Hashable, Callable[[str], None]] = field(default_factory=dict)


def group(keys: Iterable[str]) -> list[Template]:
    """The templates of the keys, in order of first appearance; linear.

    A slot is a segment that `{n:int}` reads: ASCII digits without leading zeros.
    """
    found: dict[str, Template] = {}
    literal: dict[str, Template] = {}
    shapes: dict[bytes, _DigitShape] = {}
    order: list[Template] = []
    for key in keys:
        blind = key.encode("utf-8", "surrogatepass").translate(_SHAPE)
        shape = shapes.get(blind)
        if shape is None:
            shape = shapes[blind] = _shape(key)
        join = shape.one
        if join is None:
            rest = shape.rest(key)
            join = shape.several.get(rest)
            if join is None:
                text = key if not shape.borders else _text(key, shape.borders)
                known = literal if SLOT in key else found
                template = known.get(text)
                if template is None:
                    template = known[text] = Template(text, literal=SLOT in key)
                    order.append(template)
                join = shape.several[rest] = template.keys.append
                # with digits left, keys of this shape can have other ones
                if DIGITS.isdisjoint(text):
                    shape.one = join
        join(key)
    return order


def _shape(key: str) -> _DigitShape:
    borders: list[int] = []
    start = 0
    for segment in key.split(".") if SLOT not in key else ():
        end = start + len(segment)
        if is_integer(segment):
            borders += (start, end)
        start = end + 1
    slots = set(borders[::2])
    rest: list[int | slice] = []
    for run in _RUN.finditer(key):
        start, end = run.span()
        if start not in slots:
            # single characters are not made anew
            rest.append(start if end - start == 1 else slice(start, end))
    return _DigitShape(tuple(borders), itemgetter(*rest) if rest else _no_rest)


def _no_rest(key: str) -> Hashable:
    return None


def is_integer(segment: str) -> bool:
    """Whether `{n:int}` takes the whole segment: ASCII digits, no leading zero."""
    return (
        segment.isdigit()
        and segment.isascii()
        and (segment[0] != "0" or segment == "0")
        and len(segment) <= LONGEST_INT
    )


def _text(key: str, borders: tuple[int, ...]) -> str:
    out: list[str] = []
    done = 0
    for a, b in zip(borders[::2], borders[1::2], strict=True):
        out += (key[done:a], SLOT)
        done = b
    return "".join(out) + key[done:]


# ---------------------------------------------------------------------- binding

_Column = Callable[[Sequence[tuple[int, ...]]], Iterable[Value | None]]


@dataclass(frozen=True, slots=True)
class Binding:
    """A pattern matched against a template: how the captures' values follow from its integers."""

    template: Template
    # one column for each capture, and further columns that must agree with the one at that index
    columns: tuple[_Column, ...]
    agreeing: tuple[tuple[int, _Column], ...]
    partial: bool

    def rows(self) -> list[Row | None]:
        """For each of the template's keys what `Pattern.match` returns for it, in order."""
        ints = self.template.ints
        if not self.columns:
            return [()] * len(ints)
        if not self.partial and not self.agreeing:
            return list(zip(*[column(ints) for column in self.columns], strict=False))
        columns = [list(islice(column(ints), len(ints))) for column in self.columns]
        matching = [all(value is not None for value in row) for row in zip(*columns, strict=True)]
        for at, column in self.agreeing:
            matching = [
                fits and a == b
                for fits, a, b in zip(matching, columns[at], column(ints), strict=False)
            ]
        return [
            row if fits else None
            for fits, row in zip(matching, zip(*columns, strict=True), strict=True)
        ]


def bind(pattern: Pattern, template: Template) -> Binding | Literal[_PerKey.PER_KEY] | None:
    """How `pattern` reads the keys of `template`; None if it matches none, PER_KEY if they differ.

    Raises what `Pattern.match` raises for one of the keys.
    """
    if pattern.has_flat:
        pattern.match("")
    text = template.text
    slots = 0 if template.literal else text.count(SLOT)
    if not slots:
        values = pattern.match(text)
        return (
            None if values is None else Binding(template, tuple(map(_constant, values)), (), False)
        )
    if not pattern.anchors.issubset(text.split(".")):
        return None
    if pattern.touches_digits or SLOT in pattern.text:
        return PER_KEY
    first, last = pattern.parts[0], pattern.parts[-1]
    if isinstance(first, LiteralPart) and not text.startswith(first.text):
        return None
    if isinstance(last, LiteralPart) and not text.endswith(last.text):
        return None
    tables = advance(pattern.parts, text, SLOT)
    found = ways(pattern.parts, tables, text)
    if not found:
        return None
    solving = any(isinstance(part, Integer) and not part.direct for part in pattern.parts)
    if found > 1:
        if not pattern.repeats and not solving:
            pattern.match(template.keys[0])
        return PER_KEY
    borders = next(cuts(pattern.parts, tables, text, SLOT))
    columns: dict[int, _Column] = {}
    agreeing = []
    for i, part, at in pattern.takes:
        column = _column(part, text[borders[i] : borders[i + 1]], text.count(SLOT, 0, borders[i]))
        if at in columns:
            agreeing.append((at, column))
        else:
            columns[at] = column
    return Binding(
        template, tuple(columns[at] for at in range(len(columns))), tuple(agreeing), solving
    )


def matching(pattern: Pattern, template: Template) -> Sequence[bool]:
    """For each key whether the pattern matches it, in any reading: no values are made."""
    try:
        binding = bind(pattern, template)
    except TwoReadings:
        binding = PER_KEY
    if binding is PER_KEY:
        return [matches(pattern, key) for key in template.keys]
    if binding is None or not (binding.partial or binding.agreeing):
        return [binding is not None] * len(template.keys)
    return [row is not None for row in binding.rows()]


def matches(pattern: Pattern, key: str) -> bool:
    """Whether the pattern matches the key, under whatever reading."""
    try:
        return pattern.match(key) is not None
    except TwoReadings:
        return True


def _column(part: Taking, text: str, slot: int) -> _Column:
    """The values of a capture that takes `text` of the template, slots numbered from `slot`."""
    if SLOT not in text:
        return _constant(part.value(text))
    if isinstance(part, Integer):
        pick = itemgetter(slot)
        if part.direct:
            return lambda ints: map(pick, ints)
        solve = part.solve
        return lambda ints: map(solve, map(pick, ints))
    # The first or last character that `value` cuts off is a dot, never a slot.
    head, *tails = str(part.value(text)).split(SLOT)
    if len(tails) == 1:
        pick, tail = itemgetter(slot), tails[0]

        def one_slot(ints: Sequence[tuple[int, ...]]) -> Iterable[Value | None]:
            numbers = list(map(pick, ints))
            texts = {n: f"{head}{n}{tail}" for n in set(numbers)}
            return map(texts.__getitem__, numbers)

        return one_slot
    form = "%s".join(piece.replace("%", "%%") for piece in (head, *tails))
    some = slice(slot, slot + len(tails))
    return lambda ints: [form % row[some] for row in ints]


def _constant(value: Value) -> _Column:
    return lambda ints: repeat(value, len(ints))


# ------------------------------------------------------------------------------------------ ranks
#
# Keys that stand in several files of one checkpoint are called `key@0`, `key@1`. A pattern that
# does not speak of ranks sees each rank's keys without their `@r`; one that does sees a key of a
# single file as rank 0. All keys of a template have one rank, so both are settled once.


def rank_of(key: str) -> int | None:
    """The rank that stands at the end of a key of several files, `key@1`; None for a plain key."""
    found = split_rank(key)
    return None if found is None else found[1]


def split_rank(key: str) -> tuple[str, int] | None:
    """A key of several files without its rank, and the rank; None for a plain key."""
    base, at, digits = key.rpartition("@")
    if not at or not base:
        return None
    # most ranks are small
    rank = _SMALL.get(digits)
    if rank is None:
        rank = int(digits) if is_integer(digits) else None
    return None if rank is None else (base, rank)


_SMALL: Final = {str(number): number for number in range(256)}


def names_rank(pattern: Pattern) -> bool:
    """Whether the pattern speaks of ranks: `@{r:int}` or `@0` at its end."""
    return pattern.ranked or rank_of(pattern.text) is not None


def without_rank(template: Template) -> tuple[Template, int | None]:
    """The template with its rank cut off, which is the same for all its keys, and that rank."""
    rank = rank_of(template.text)
    if rank is None:
        return template, None
    end = -len(f"@{rank}")
    keys = [key[:end] for key in template.keys]
    # what is cut off has no slots
    return Template(template.text[:end], keys, template.known, template.literal), rank


# a template, and what `without_rank` makes of it
Ranked = tuple[Template, tuple[Template, int | None]]


def ranked(keys: Iterable[str]) -> list[Ranked]:
    """The templates of the keys, each with what it is without its rank."""
    return [(t, without_rank(t) if "@" in t.text else (t, None)) for t in group(keys)]


def with_rank_0(pattern: Pattern, template: Template, rank: int | None) -> Template:
    """The template as a pattern with `@{r:int}` sees it: a key of one file has rank 0."""
    if rank is not None or not pattern.ranked:
        return template
    return Template(
        f"{template.text}@0", [f"{key}@0" for key in template.keys], template.ints, template.literal
    )


def as_seen(pattern: Pattern, key: str) -> str:
    """The key as a pattern sees it: with rank 0 where it stands in one file and the pattern has
    `@{r:int}`, without its rank where the pattern does not speak of ranks."""
    rank = rank_of(key)
    if not names_rank(pattern):
        return key if rank is None else key[: -len(f"@{rank}")]
    return f"{key}@0" if pattern.ranked and rank is None else key


def takes(pattern: Pattern, key: str) -> bool:
    """Whether the pattern fits the key, under whatever reading."""
    return matches(pattern, as_seen(pattern, key))


def seen_by(
    pattern: Pattern, template: Template, cut: tuple[Template, int | None] | None = None
) -> Template:
    """The template as a pattern sees it, which is what `as_seen` makes of each key.

    `cut` is what `without_rank` says of the template, where it is known already.
    """
    if "@" not in template.text and "@" not in pattern.text:
        return template
    base, rank = cut or without_rank(template)
    return with_rank_0(pattern, template, rank) if names_rank(pattern) else base


def rows(pattern: Pattern, seen: Template) -> Sequence[Row | None]:
    """For each key the values of the pattern's captures; None where it does not match, or in two
    ways.
    """
    try:
        binding = bind(pattern, seen)
    except TwoReadings:
        binding = PER_KEY
    if binding is PER_KEY:
        return [_row(pattern, key) for key in seen.keys]
    return [None] * len(seen.keys) if binding is None else binding.rows()


def _row(pattern: Pattern, key: str) -> Row | None:
    try:
        return pattern.match(key)
    except TwoReadings:
        return None


# ------------------------------------------------------------------------------------- collapsing
#
# A list of a thousand keys is of no use to a reader. Keys of one form are one line with the ranges
# of their integers; lines that differ in one word, with the same integers and the same tag, become
# one line with alternatives. Words are put together when they are alike (`q_proj` and `k_proj`,
# `w1` and `w3`, `running_mean` and `running_var`) or few: a list of unrelated names says less than
# the names. Text from a checkpoint is escaped, and its braces are doubled as in patterns.

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
    """One line: its `text`, the `count` of keys that it stands for, and the first, unescaped."""

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
class _KeyLine:
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


def _lines(form: Form) -> list[_KeyLine]:
    slots = set(form.slots)
    words = tuple(() if i in slots else (segment,) for i, segment in enumerate(form.segments))
    found = _products(form.ints, len(form.slots))
    if len(found) == 1:
        return [_KeyLine(form.tag, found[0], form.slots, words, len(form.keys), form.keys[0])]
    samples: dict[tuple[int, ...], str] = dict(
        zip(reversed(form.ints), reversed(form.keys), strict=True)
    )
    lines = []
    for axes in found:
        first = tuple(axis[0] for axis in axes)
        lines.append(
            _KeyLine(form.tag, axes, form.slots, words, prod(map(len, axes)), samples[first])
        )
    return lines


def _products(rows: Sequence[tuple[int, ...]], width: int) -> list[tuple[tuple[int, ...], ...]]:
    """The rows as few products of sets of integers, or as one that holds them all."""
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
    """The rows, of `width` integers, as disjoint products of sorted sets; not all beyond `most`."""
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


def _merge_at(lines: list[_KeyLine], back: int) -> list[_KeyLine]:
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


def collapse(keys: Sequence[str], tag: Callable[[str], Hashable] | None = None) -> list[Collapsed]:
    """The keys for printing, those of one form on one line, in order of first appearance.

    Keys are put together only where `tag` gives equal values for them.
    """
    forms: dict[tuple[int, Hashable], Form] = {}
    for number, template in enumerate(group(keys)):
        segments = tuple(template.text.split("."))
        slots = (
            ()
            if template.literal
            else tuple(i for i, segment in enumerate(segments) if segment == SLOT)
        )
        if tag is None:
            forms[number, None] = Form(segments, slots, None, template.keys, template.ints)
            continue
        for key, ints in zip(template.keys, template.ints, strict=True):
            value = tag(key)
            form = forms.get((number, value))
            if form is None:
                form = forms[number, value] = Form(segments, slots, value, [], [])
            form.keys.append(key)
            form.ints.append(ints)
    return merge(forms.values())


def list_collapsed(keys: Iterable[str], limit: int = 20) -> str:
    """The keys for a message: at most `limit` lines of `collapse`, comma-separated."""
    return listed([line.text for line in collapse(list(keys))], limit)
