"""How integers of a few bits lie in words of 32.

3, 5, 6 and 7 bits do not fill a word: codes go on across the borders of words (`dense`), or the
bits that are left of each word mean nothing (`words`). Other widths have one form, None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...core.errors import OpError
from ...core.spec import Spec
from ..base import arg
from .groups import check_whole_groups
from .layout import Grid, NumberLayout, Packing, integers, times

BITS = (2, 3, 4, 8)
# and what compressed-tensors packs beside them
PACKED = (2, 3, 4, 5, 6, 7, 8)
FORMS = ("dense", "words")
# as many codes of 7 bits as of 8 lie within a word, so that these are read only where they are said
ODD = 7, "words"
# dtypes of parts that are shapes
WHOLE = ("int64", "int32")


def bits_arg() -> Any:
    """`bits`: how wide codes are."""
    return arg(
        "bits of a code, by default as lengths say; what encodes makes 4",
        values=PACKED,
        default=None,
    )


def symmetric_arg() -> Any:
    """`symmetric`: whether zeros say that they are read in the wrong form."""
    return arg(
        "all zeros are the middle of the codes: refuse those that would be in the other form",
        default=False,
    )


def stored_bits_arg() -> Any:
    """`bits` of a codec that does not encode."""
    return arg("bits of a code, by default those that the shapes show", values=BITS, default=None)


def form_arg() -> Any:
    """`form`: how codes that do not fill words lie in them."""
    return arg(
        "how 3, 5, 6 or 7 bits lie, where lengths do not tell: dense, across the borders of words "
        "(by default what encodes makes), or words, as compressed-tensors had them until 2026",
        words=FORMS,
        default=None,
    )


def shape_arg() -> Any:
    """`shape`: how the shape is stored."""
    return arg(
        "the dtype of the part that says the shape", words=WHOLE, encoding=True, default=WHOLE[0]
    )


def is_split(bits: int) -> bool:
    """Whether words are no whole number of such codes."""
    return 32 % bits > 0


class WordForm(NamedTuple):
    """A width of codes and how they lie in words."""

    bits: int
    form: str | None

    def packing(self) -> Packing:
        """Along rows, in int32."""
        return Packing(self.bits, ("int32",), dense=is_split(self.bits) and self.form != "words")

    def layout(
        self,
        name: str,
        group: int | None,
        size: tuple[int, ...] | None,
        has_zero: bool,
        positive: bool = False,
        index: str = "",
    ) -> NumberLayout:
        """Of numbers of this size, of which each `group` of a row, or those that the part `index`
        names, share a scale, and a zero that is packed down the rows.
        """
        codes, block = self.packing(), (1, 1 if index else group or 0)
        zeros = replace(codes, axis=-2) if has_zero else None
        return of_words(name, codes, zeros, block, size, positive=positive, index=index)

    def __str__(self) -> str:
        where = {"dense": " across words", "words": " within words"}.get(self.form or "", "")
        return f"{self.bits} bits{where}"


def of_words(
    name: str,
    codes: Packing,
    zeros: Packing | None,
    block: tuple[int, int],
    size: tuple[int, ...] | None = None,
    *,
    positive: bool,
    nonzero: bool = False,
    symmetric: bool = False,
    transposed: bool = False,
    index: str = "",
    padded: tuple[int, int] = (1, 1),
) -> NumberLayout:
    """Integers less the zero of their block, or without zeros the middle of all codes, times its
    scale. `transposed`: codes, zeros and scales are. `symmetric`: all zeros are the middle of the
    codes, and refused where they would be in the other form, with one more added or less.
    """
    elements, zero = integers(codes.bits, 0 if zeros else 1 << (codes.bits - 1)), None
    entries = Grid("scale", block, transposed=transposed, padded=padded, index=index)
    if zeros is not None:
        middle = 1 << (codes.bits - 1)
        misread = middle + (1 if zeros.plus else -1) if symmetric else None
        zero = replace(
            entries, role="zero", elements=elements, packing=zeros, nonzero=nonzero, misread=misread
        )
    scale = times(replace(entries, positive=positive))
    codes = replace(codes, transposed=transposed)
    return NumberLayout(name, elements, codes, scale, zero, shape=size, axes=2)


def size_stored(name: str, specs: Mapping[str, Spec], value: bytes) -> tuple[int, int]:
    """The rows and columns that the bytes of the part `shape` say. OpError M310 where they are no
    two integers, or where the weight has other rows.
    """
    shape, weight = specs["shape"], specs["weight"]
    if shape.dtype not in WHOLE or shape.shape != (2,):
        raise OpError("M310", f"{name}: the shape is {shape}, not two of {' or '.join(WHOLE)}")
    half = len(value) // 2
    rows, columns = (int.from_bytes(value[i : i + half], "little", signed=True) for i in (0, half))
    if len(weight.shape) != 2 or min(rows, columns) < 0 or weight.shape[0] != rows:
        raise OpError("M310", f"{name}: the shape says {[rows, columns]}, the weight is {weight}")
    return rows, columns


def size_bytes(shape: tuple[int, ...], dtype: str) -> bytes:
    """What `size_stored` reads."""
    return b"".join(n.to_bytes({"int64": 8, "int32": 4}[dtype], "little") for n in shape)


def form_stored(
    name: str,
    said: WordForm | tuple[int | None, str | None],
    size: tuple[int, int],
    specs: Mapping[str, Spec],
) -> WordForm:
    """The form in which numbers of this size have as many words as `weight`, and as `zero`, which
    is packed down the rows; `said` is what is known of it. OpError M310 where none has, or several.
    """  # fmt: skip
    found = list(_forms(said, size, specs))
    if len(found) == 1:
        return found[0]
    if found and 0 in size:
        # no numbers are read: what encodes makes 4 bits
        return next((one for one in found if one.bits == 4), found[0])
    bits, form = said
    text = f"{name}: the shape says {list(size)}, the weight is {specs['weight']}"
    if "zero" in specs:
        text += f" and the zero {specs['zero']}"
    if not found:
        known = WordForm(bits, form) if bits else f"{PACKED[0]} to {PACKED[-1]} bits"
        raise OpError("M310", f"{text}, which codes of {known} do not have")
    arguments = [
        ", ".join([f"bits: {one.bits}"] * (bits is None) + [f"form: {one.form}"] * bool(one.form))
        for one in found
    ]
    raise OpError(
        "M310",
        f"{text}: codes may have {' or '.join(map(str, found))}",
        help=f"write {' or '.join(f'`{said}`' for said in arguments)}",
    )


def _forms(
    said: tuple[int | None, str | None], size: tuple[int, int], specs: Mapping[str, Spec]
) -> Iterator[WordForm]:
    bits, form = said
    codes, zero = specs["weight"].shape, specs.get("zero")
    longest = max(size[1], 0 if zero is None else size[0])
    for width in PACKED if bits is None else (bits,):
        # codes of one word are the same in both forms
        both = FORMS if longest > 32 // width else FORMS[:1]
        for one in (None,) if not is_split(width) else (form,) if form else both:
            if bits is None and (width, one) == ODD:
                continue
            packing = WordForm(width, one).packing()
            if packing.words(size[1], "int32") != codes[1]:
                continue
            if zero is None or zero.shape[:1] == (packing.words(size[0], "int32"),):
                yield WordForm(width, one)


def bits_shown(
    name: str, said: int | None, specs: Mapping[str, Spec], lengths: Mapping[str, tuple[int, int]]
) -> int:
    """The bits of codes that go on across words, of which the parts of these roles have so many,
    and so many words. OpError M310 with what each part shows where they, or `said`, disagree or
    several fit.
    """
    shown = {role: [b for b in BITS if -(-n * b // 32) == w] for role, (n, w) in lengths.items()}
    fitting = [b for b in BITS if all(b in known for known in shown.values())]
    if said in fitting or (said is None and len(fitting) == 1):
        return said or fitting[0]
    found = [f"`bits` says {said}"] if said else []
    for role, known in shown.items():
        several = " or ".join(map(str, known)) or "no known number of"
        found.append(f"by its shape {list(specs[role].shape)} the {role} is of {several} bits")
    raise OpError("M310", f"{name}: {', '.join(found)}", help="write `bits` as the parts are")


def check_groups(name: str, spec: Spec, group: int | None) -> None:
    """OpError M304 for numbers that are no rows and columns, or whose rows are no whole groups."""
    if len(spec.shape) != 2:
        raise OpError("M304", f"{name} is of rows and columns, these are {spec}")
    if group:
        check_whole_groups(name, spec.shape[1], group)
