"""How producers call the parts of a tensor in a number format, and what dtypes and shapes say.

A codec has a `Convention` for each way in which its parts are called on disk:

    Convention("ModelOpt", {
        "weight": "{w}.weight uint8 [*, N, K/2]",
        "scale": "{w}.weight_scale float8_e4m3fn [*, N, K/16]",
        "global": "{w}.weight_scale_2 float32 []",
    }, beside={"input_scale": "{w}.input_scale"})

A part is one text: its name, `?` behind it where it need not be there, its dtypes, and its shapes.
A name is `{w}`, which stands for any text, and an ending: `.weight`, `_scales`, or nothing; where
the ending begins with a dot, `{w}` may be empty, and the dot goes too. Dtypes are torch's names
with `|` between them; `float8` and `wide` are names of several. Shapes have `|` between them as
well. Without dtypes or shapes, any will do.

In a shape `*` is any number of leading axes, the same in all parts, and the other lengths are in
the notation of `Length`. Names of one letter are sizes of the tensor of numbers, longer ones
arguments of the codec, which follow from the lengths: a weight `[*, N, K]` with the scale
`[*, N, K/group]` says what `group` is.

Names alone say little: `weight` and `weight_scale` are parts of eight formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .spec import Spec

WIDE = ("float32", "bfloat16", "float16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
# what a linear layer keeps beside its weight, and who reads it
ACTIVATIONS = {
    name: f"{{w}}.{name}"
    for name in (
        "input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale",
        "k_scale", "v_scale", "pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b",
    )
}  # fmt: skip
# what an attention keeps beside its projections, and a name that it may keep them under
_OF_ATTENTION = ("k_scale", "v_scale", "attn.k_scale", "attn.v_scale")
_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj")
# Transformer Engine's second copy for the other direction of a product
COLUMNWISE = {
    "columnwise_data": "{w}._columnwise_data",
    "columnwise_scale": "{w}._columnwise_scale_inv",
}
# roles of these that mean something beside plain weights too: those of the KV cache
OF_CACHES = ("k_scale", "v_scale")
# the role of what inputs are multiplied by because AWQ divided the columns of the weight by it: a
# layer without it computes something else
OF_INPUTS = "pre_quant_scale"
# and what a layer adds to the product, the rest of the weight as a product of two small ones
BESIDE_PRODUCTS = (OF_INPUTS, "svdquant_lora_a", "svdquant_lora_b")
_SEVERAL = {"wide": WIDE, "float8": FLOAT8}
# what an argument may be where lengths leave it open
_CHOICES = {"bits": (4, 8, 3, 2)}
_LENGTH = re.compile(r"(?:(\d+)\*)?([A-Z])(?:\*([a-z]{2,}))?(?:/(\d+|[a-z]{2,}))?(?::(\d+))?")
_STEM = "{w}"


class Length(NamedTuple):
    """The length of one axis, as `32*K*bits/128:4`: the size K times `bits`, divided by 128 and
    rounded up, times 32, and rounded up to a multiple of 4. All but the size may be absent; a
    divisor may be an argument. A number alone is itself, `size` is empty then.
    """

    factor: int
    size: str
    times: str | None
    divisor: int | str
    multiple: int


class StoredPart(NamedTuple):
    """How one part is stored; see the notation above. `shapes` are alternatives: whether there are
    leading axes, and the lengths of the others.
    """

    ending: str
    optional: bool
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[bool, tuple[Length, ...]], ...]


class Convention(NamedTuple):
    """What one producer calls the parts: role -> part, the first being the one with the codes.

    beside: role -> name of what travels with the tensor and is not needed to decode it.
    arguments: what the codec has to be given where this convention is met.
    either: arguments of which headers tell nothing but that they are one of these.
    sizes: role -> the sizes of the numbers that the elements of this part are, in order.
    says: role -> the argument that the one element of this part is, and how its number is written.
    accepts: whether these arguments make sense; lengths alone may fit by chance.
    """

    producer: str
    parts: Mapping[str, str]
    beside: Mapping[str, str] = {}
    arguments: Mapping[str, Any] = {}
    either: Mapping[str, tuple[Any, ...]] = {}
    sizes: Mapping[str, tuple[str, ...]] = {}
    says: Mapping[str, tuple[str, Callable[[int], str]]] = {}
    accepts: Callable[[Mapping[str, Any]], bool] | None = None


class Reading(NamedTuple):
    """A format that tensors can be in: the codec's name, whose convention it is, the arguments that
    follow from dtypes and shapes, the ending of each part that is there, and those of parts that
    are missing.
    """

    format: str
    producer: str
    arguments: Mapping[str, Any]
    endings: Mapping[str, str]
    missing: tuple[str, ...] = ()


@lru_cache(maxsize=1024)
def stored_part(text: str) -> StoredPart:
    """A part as `Convention` writes it. ValueError for any other notation."""
    name, _, rest = text.partition(" ")
    dtypes, _, shapes = rest.strip().partition(" ")
    if dtypes.startswith("["):
        dtypes, shapes = "", rest
    optional = name.endswith("?")
    return StoredPart(
        ending(name[:-1] if optional else name),
        optional,
        tuple(one for word in dtypes.split("|") if word for one in _SEVERAL.get(word, (word,))),
        tuple(map(_shape, shapes.split("|"))) if shapes.strip() else (),
    )


def ending(name: str) -> str:
    """What stands behind `{w}` in a name. ValueError where it does not begin with that."""
    if not name.startswith(_STEM) or "{" in name[len(_STEM) :]:
        raise ValueError(f"the name {name!r} does not begin with {_STEM}, or has more of it")
    return name[len(_STEM) :]


def _shape(text: str) -> tuple[bool, tuple[Length, ...]]:
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(f"{text!r} is not a shape, `[…]`")
    words = [word.strip() for word in text[1:-1].split(",")] if text != "[]" else []
    leading = words[:1] == ["*"]
    return leading, tuple(map(_length, words[leading:]))


def _length(word: str) -> Length:
    if word.isdigit():
        return Length(int(word), "", None, 1, 1)
    found = _LENGTH.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} is not the length of an axis")
    factor, size, times, divisor, multiple = found.groups()
    by = divisor or "1"
    return Length(
        int(factor or 1), size, times, int(by) if by.isdigit() else by, int(multiple or 1)
    )


def lengths_of(part: StoredPart, known: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The lengths of the axes of a part without leading ones, in the first of its shapes, where
    sizes and arguments are these; None where one is not known.
    """
    found = []
    for length in part.shapes[0][1]:
        words = (length.size or None, length.times, length.divisor)
        if any(isinstance(word, str) and word not in known for word in words):
            return None
        size = known[length.size] if length.size else 1
        size *= 1 if length.times is None else known[length.times]
        by = known[length.divisor] if isinstance(length.divisor, str) else length.divisor
        found.append(-(-(-(-size // by) * length.factor) // length.multiple) * length.multiple)
    return tuple(found)


def key_of_part(stem: str, end: str) -> str:
    """The key with this ending, `stem` being what `{w}` stands for."""
    return stem + end if stem else end.removeprefix(".")


class Endings:
    """Endings of keys and what they stand for, found in time linear in the key."""

    def __init__(self, entries: Iterable[tuple[str, Any]]) -> None:
        self._entries: dict[str, list[Any]] = {}
        for end, value in entries:
            self._entries.setdefault(end, []).append(value)
        self._of_leaf: dict[str, list[str]] = {}

    def find(self, key: str) -> Sequence[tuple[str, str, list[Any]]]:
        """(what `{w}` stands for, ending, its entries), for each ending that the key has."""
        leaf = key[key.rfind(".") + 1 :]
        ends = self._of_leaf.get(leaf)
        if ends is None:
            ends = [end for end in self._entries if _may_end(leaf, end)]
            # there are few last segments, but a checkpoint may hold as many as keys
            if len(self._of_leaf) < 10_000:
                self._of_leaf[leaf] = ends
        if not ends:
            return ()
        found = []
        for end in ends:
            if key.endswith(end):
                found.append((key[: len(key) - len(end)], end, self._entries[end]))
            elif key == end[1:] and end[0] == ".":
                found.append(("", end, self._entries[end]))
        return found


def _may_end(leaf: str, end: str) -> bool:
    """Whether a key with this last segment may have the ending, or be all of it but its dot."""
    if "." not in end:
        return leaf.endswith(end)
    return end[end.rfind(".") + 1 :] == leaf


class PartNames:
    """The conventions of all formats, by the endings of their parts."""

    def __init__(self, conventions: Iterable[tuple[str, Convention]]) -> None:
        firsts: dict[str, list[tuple[str, Convention]]] = {}
        others: dict[str, dict[str, bool]] = {}
        pairs: dict[tuple[str, str], tuple[str, bool]] = {}
        # ending of the codes -> endings of parts whose elements say what the numbers are
        self.sized: dict[str, dict[str, None]] = {}
        for name, convention in conventions:
            parts = {role: stored_part(text) for role, text in convention.parts.items()}
            first = next(iter(parts.values())).ending
            firsts.setdefault(first, []).append((name, convention))
            known = others.setdefault(first, {})
            for role in (*convention.sizes, *convention.says):
                self.sized.setdefault(first, {})[parts[role].ending] = None
            rest = [(role, part.ending, True) for role, part in parts.items()][1:]
            rest += [(role, ending(text), False) for role, text in convention.beside.items()]
            for role, end, decodes in rest:
                # a part of one format may be of no use in another
                known[end] = decodes or known.get(end, False)
                pairs[first, end] = (role, known[end])
        for first in firsts:
            # words of a module, not of a key that the codes are alone in
            for projection in _PROJECTIONS if first.startswith(".") else ():
                pairs |= {
                    (f".{projection}{first}", f".{name}"): (role, False)
                    for name in _OF_ATTENTION
                    # that of keys belongs to their projection, and to none of values alone
                    if projection[0] in ("q", (role := name[-len("k_scale") :])[0])
                }
        self._conventions, self._others = firsts, others
        self.firsts = Endings((first, None) for first in firsts)
        self.others = Endings(
            (end, (first, role, decodes)) for (first, end), (role, decodes) in pairs.items()
        )

    def partners(self, first: str) -> Mapping[str, bool]:
        """The endings of what may belong to a part with codes of this ending, and whether decoding
        needs it in any format.
        """
        return self._others[first]

    def read(
        self,
        first: str,
        specs: Mapping[str, Spec],
        elements: Mapping[str, tuple[int, ...]] = {},
    ) -> list[Reading]:
        """The formats that tensors of one stem can be in: `specs` by ending, `first` the one with
        the codes. Where no convention has all of its parts, those that have two and lack others.
        `elements` are those of parts that say what the numbers are, as far as they are known.

        Of several readings those that explain the most parts; the first has the convention declared
        first.
        """
        found: list[Reading] = []
        partial: list[Reading] = []
        for name, convention in self._conventions[first]:
            for reading in _read(name, convention, specs, elements):
                (partial if reading.missing else found).append(reading)
        chosen = found or partial
        most = max((len(reading.endings) for reading in chosen), default=0)
        return [reading for reading in chosen if len(reading.endings) == most]


def _read(
    name: str,
    convention: Convention,
    specs: Mapping[str, Spec],
    elements: Mapping[str, tuple[int, ...]],
) -> Iterator[Reading]:
    there: dict[str, str] = {}
    missing = []
    known = dict(convention.arguments)
    for role, sizes in convention.sizes.items():
        said = elements.get(stored_part(convention.parts[role]).ending)
        if said is not None:
            if len(said) != len(sizes):
                return
            known |= zip(sizes, said, strict=True)
    for role, (argument, word) in convention.says.items():
        said = elements.get(stored_part(convention.parts[role]).ending, ())
        if len(said) == 1:
            known[argument] = word(said[0])
    solutions: list[dict[str, Any]] = [known]
    for role, text in convention.parts.items():
        part = stored_part(text)
        spec = specs.get(part.ending)
        if spec is None:
            if not part.optional:
                missing.append(part.ending)
            continue
        if part.dtypes and spec.dtype not in part.dtypes:
            return
        if part.shapes:
            solutions = [
                more
                for known in solutions
                for shape in part.shapes
                for more in _solve(shape, spec.shape, known)
            ]
        there[role] = part.ending
    # the codes alone are evidence of nothing
    if len(there) < 2:
        return
    beside = {
        role: end
        for role, end in ((r, ending(t)) for r, t in convention.beside.items())
        if end in specs
    }
    seen = []
    for solution in solutions:
        arguments = {key: value for key, value in solution.items() if len(key) > 1}
        if arguments in seen or (
            convention.accepts is not None and not convention.accepts(solution)
        ):
            continue
        seen.append(arguments)
        for chosen in product(*convention.either.values()):
            either = dict(zip(convention.either, chosen, strict=True))
            yield Reading(
                name,
                convention.producer,
                {**arguments, **either},
                {**there, **beside},
                tuple(missing),
            )


def _solve(
    shape: tuple[bool, tuple[Length, ...]], lengths: Sequence[int], known: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All that sizes and arguments can be where `lengths` are those of `shape`, beside `known`."""
    leading, wanted = shape
    count = len(lengths) - len(wanted)
    if count < 0 or (count and not leading):
        return []
    first = tuple(lengths[:count])
    if leading and known.get("*", first) != first:
        return []
    solutions = [{**known, "*": first} if leading else dict(known)]
    for length, found in zip(wanted, lengths[count:], strict=True):
        solutions = [more for one in solutions for more in _fit(length, found, one)]
    return solutions


def _fit(length: Length, found: int, known: dict[str, Any]) -> list[dict[str, Any]]:
    if not length.size:
        return [known] if found == length.factor else []
    if length.times is not None and length.times not in known:
        choices = _CHOICES.get(length.times, ())
        return [
            more for one in choices for more in _fit(length, found, {**known, length.times: one})
        ]
    times = 1 if length.times is None else known[length.times]
    size, by = known.get(length.size), length.divisor
    if size is None:
        if isinstance(by, str) or found % length.factor:
            return []
        return [{**known, length.size: found // length.factor * by // times}]
    if isinstance(by, str) and by not in known:
        if length.multiple > 1 or found % length.factor:
            return []
        parts = found // length.factor
        if parts == 1:
            # a divisor of any size above
            return [known]
        divisor = _divisor(size * times, parts)
        return [{**known, by: divisor}] if divisor else []
    parts = -(-size * times // (known[by] if isinstance(by, str) else by)) * length.factor
    return [known] if -(-parts // length.multiple) * length.multiple == found else []


def _divisor(size: int, parts: int) -> int:
    """What `size` was divided by to make two or more parts, the last of which may be smaller: the
    power of two where there is one, else the smallest; 0 where there is none.
    """
    if not 1 < parts <= size:
        return 0
    low, high = -(-size // parts), (size - 1) // (parts - 1)
    power = 1 << (high.bit_length() - 1)
    return 0 if low > high else max(power, low)
