"""How many numbers of a row share a scale, as an argument, a configuration or shapes say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import OpError
from ...core.spec import Spec
from ..base import arg

# what configurations say of a group that is a whole row
WHOLE = -1
HELP = "write `group`, the columns that share a scale: the quantization config has their number"


def group_arg() -> Any:
    """`group` of a codec that encodes."""
    return arg(
        "numbers of a row that share a scale, by default as lengths say; what encodes makes one "
        "scale of each row",
        least=1,
        default=None,
    )


def stored_group_arg() -> Any:
    """`group` of a codec that does not encode, as configurations have it."""
    return arg(
        "columns that share a scale, -1 for all of them; by default those that the shapes show",
        least=WHOLE,
        default=None,
    )


def columns_said(name: str, columns: int, said: int) -> int:
    """`group` in columns. OpError M308 for a group of none."""
    if not said:
        raise OpError("M308", f"{name}: `group` is 0, it must be -1 or at least 1")
    return columns if said == WHOLE else said


def group_of(name: str, columns: int, groups: int, said: int | None) -> int:
    """The columns of a group, where there are so many groups: `said`, or the power of two, or all
    columns, that shapes show. OpError M310 where they do not, or show something else.
    """
    if said is not None:
        each = columns_said(name, columns, said)
        if -(-columns // each) != groups:
            raise OpError(
                "M310",
                f"{name}: {columns} columns in groups of {each} are {-(-columns // each)} groups, "
                f"the scale has {groups}",
            )
        return each
    each = columns // max(groups, 1)
    if each * groups != columns or (groups > 1 and each & (each - 1)):
        raise OpError(
            "M310",
            f"{name}: no power of two divides {columns} columns into {groups} groups",
            help=HELP,
        )
    return each


def block_of(name: str, columns: int, groups: int, said: int | None, index: str) -> tuple[int, int]:
    """The block of numbers that share an entry; of one column where a part of the role `index`
    names the group of each. OpError M310 as `group_of`.
    """
    if index and said is None:
        return 1, 1
    each = group_of(name, columns, groups, said)
    return 1, 1 if index else each


def padded_group(
    name: str, columns: int, words: int, said: int | None, multiples: Mapping[int, int]
) -> tuple[int, tuple[int, int]]:
    """The columns of a group, and the multiples that a stored matrix of scales is padded to, where
    rows of zeros, eight in a word, have so many words: of groups of each size a multiple of some,
    and of larger ones of as many as of the largest. OpError M310 where no size fits, or several.
    """
    wanted = None if said is None else columns_said(name, columns, said)
    sizes = [*multiples, *(1 << i for i in range(columns.bit_length())), columns, wanted or columns]
    largest, fitting = max(multiples), {}
    for each in sizes:
        multiple = multiples.get(each, multiples[largest] if each > largest else 0)
        if multiple and columns % each == 0:
            padded = -(-columns // each // (8 * multiple)) * multiple
            if padded == words:
                fitting[each] = 8 * multiple
    if wanted is None and len(fitting) == 1:
        (wanted,) = fitting
    if wanted in fitting:
        return wanted, (1, fitting[wanted])
    found = " and of ".join(map(str, fitting)) or "no known size"
    but = "" if wanted is None else f", not of {wanted}"
    raise OpError(
        "M310",
        f"{name}: {words} words of zeros for {columns} columns fit groups of {found}{but}",
        help=HELP,
    )


def group_stored(name: str, columns: int, scale: Spec) -> int | None:
    """The columns that share an entry of the scale; None: all. OpError M310 where groups differ in
    length.
    """
    if len(scale.shape) < 2 or scale.shape[-1] < 2:
        return None
    if columns % scale.shape[-1]:
        raise OpError(
            "M310",
            f"{name}: the scale is {list(scale.shape)}, and {columns} columns are not "
            f"{scale.shape[-1]} groups of one length",
            help="`group` says how long all but the last are",
        )
    return columns // scale.shape[-1]


def check_whole_groups(name: str, columns: int, group: int) -> None:
    """OpError M304 where so many columns are no whole groups."""
    if columns % group:
        raise OpError("M304", f"{name}: {columns} columns are no multiple of groups of {group}")


def has_whole_groups(arguments: Mapping[str, Any]) -> bool:
    """Whether columns that a convention found are whole groups."""
    return "group" not in arguments or arguments["K"] % arguments["group"] == 0
