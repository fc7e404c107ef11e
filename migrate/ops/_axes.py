"""What the layout ops share: counting axes, comparing shapes, and saying what does not fit.

An op knows neither keys nor capture values, so a tensor of a group is called by its position; the
binder adds the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._op import OneWay, OpError

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..core.view import View

Shape = tuple[int, ...]


def shown(shape: Sequence[int]) -> str:
    """A shape as messages print it: `[2, 3]`."""
    return f"[{', '.join(map(str, shape))}]"


def axis(op: str, dim: int, shape: Shape, extra: int = 0) -> int:
    """`dim` counted from the front. `extra` axes are about to be added to `shape`. OpError M304 if
    there is no such axis.
    """
    rank = len(shape) + extra
    if -rank <= dim < rank:
        return dim % rank
    what = f"a result of rank {rank}" if extra else f"a tensor of rank {rank}"
    inside = (
        f"axes are 0 to {rank - 1}, or {-rank} to -1 from the end"
        if rank
        else "a scalar has no axes"
    )
    raise OpError(
        "M304", f"{op}: there is no axis {dim} in {what}, shape {shown(shape)}", notes=[inside]
    )


def same_shapes(label: str, shapes: Sequence[Shape], but: int | None = None) -> None:
    """OpError M301 unless all shapes are equal, apart from axis `but`."""
    first = shapes[0]
    for number, shape in enumerate(shapes):
        differs = len(shape) != len(first) or any(
            a != b for i, (a, b) in enumerate(zip(shape, first, strict=True)) if i != but
        )
        if differs:
            where = "" if but is None else f" in an axis other than {but}"
            raise OpError(
                "M301",
                f"{label}: tensor 0 is {shown(first)} and tensor {number} is {shown(shape)}; they "
                f"differ{where}",
            )


def same_dtypes(label: str, specs: Sequence[Spec]) -> None:
    """OpError M303 unless all dtypes are equal."""
    for number, spec in enumerate(specs):
        if spec.dtype != specs[0].dtype:
            message = f"{label}: tensor 0 is {specs[0].dtype} and tensor {number} is {spec.dtype}"
            raise OpError(
                "M303",
                message,
                help="nothing is promoted; write `cast` before, with `only` where it is for some",
            )


def number_of(
    label: str, views: Sequence[View], count: int | None, sizes: Sequence[int] | None = None
) -> None:
    """OpError M305 unless there is a tensor, and as many as `count` and `sizes` say."""
    for name, wanted in (("count", count), ("sizes", None if sizes is None else len(sizes))):
        if wanted is not None and wanted != len(views):
            raise OpError("M305", f"{label}: {len(views)} tensors, {name} says {wanted}")
    if not views:
        raise OpError("M305", f"{label}: there are no tensors")


def parts_of(
    label: str, values: int | None, count: int | None, sizes: Sequence[int] | None = None
) -> int:
    """How many parts the capture's values, `count` and `sizes` agree on. OpError M305 if they do
    not, or none speaks.
    """
    said = {
        "its values are": values,
        "count says": count,
        "sizes are": None if sizes is None else len(sizes),
    }
    known = {name: number for name, number in said.items() if number is not None}
    if not known:
        raise OpError("M305", f"{label}: into how many parts is not known", help="write `count`")
    if len(set(known.values())) > 1:
        raise OpError(
            "M305", f"{label}: {', '.join(f'{name} {number}' for name, number in known.items())}"
        )
    return next(iter(known.values()))


def cut(
    label: str, dim: int, size: int, parts: int, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """The sizes of `parts` parts of an axis of `size`. OpError M301, M302 or M305 if they do not
    make up the axis.
    """
    if sizes is None:
        if parts < 1 or size % parts:
            raise OpError(
                "M302",
                f"{label}: axis {dim} has {size} elements, not divisible into {parts} equal parts",
                help="write `sizes`",
            )
        return (size // parts,) * parts
    if len(sizes) != parts:
        raise OpError("M305", f"{label}: {parts} parts, sizes are {len(sizes)}: {shown(sizes)}")
    if sum(sizes) != size or min(sizes, default=0) < 0:
        raise OpError(
            "M301",
            f"{label}: sizes {shown(sizes)} add up to {sum(sizes)}, axis {dim} has {size} elements",
        )
    return tuple(sizes)


def uncounted(op: str, over: str, counted: bool) -> OneWay | None:
    """Why joining over `over` cannot be undone where nothing says how many there were; None where
    something does.
    """
    if counted:
        return None
    return OneWay(
        f"{op} over {{{over}}} does not say into how many parts a downgrade cuts", "write `count`"
    )


def stated(op: str, dim: int, size: int, of: int | None) -> None:
    """OpError M307 unless the axis has the size that `of` states."""
    if of is not None and of != size:
        raise OpError("M307", f"{op}: axis {dim} has {size} elements, `of` says {of}")


def below(label: str, name: str, value: int | None, least: int) -> None:
    """OpError M308 if the argument `name` is given and below `least`."""
    if value is not None and value < least:
        raise OpError("M308", f"{label}: `{name}` is {value}, it must be at least {least}")
