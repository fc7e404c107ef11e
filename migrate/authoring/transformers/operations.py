"""What the operations of a converter are in a rule file.

A converter's tensors have two axes: `e`, the numbers that `*` of a pattern stands for, and `w`, the
patterns themselves. Its operations consume or make them, as those of a rule do; the shapes are
followed along, because some operations ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

Op = Mapping[str, Mapping[str, Any]]


class Untold(Exception):  # noqa: N818 - an answer: no rule can say it
    """What a rule file cannot say of a converter, or of the keys that it takes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A value that config.json says, which a rule shall ask for: the places that may say it,
    and what it is.
    """

    name: str
    path: tuple[str, ...]
    value: Any
    title: str


@dataclass(slots=True)
class Conversion:
    """The tensors on their way through a converter, and the ops so far.

    `shapes` has one shape for each value of `w`, `labels` what the library calls them. `numbered`
    is how many values `e` has, `over_w` whether `w` is there. `expected` are the shapes of the
    targets in the model, `parts` how many tensors leave.
    """

    labels: tuple[str, ...]
    shapes: list[tuple[int, ...]]
    numbered: int | None
    expected: list[tuple[int, ...]]
    targets: tuple[str, ...]
    count: Callable[[int], str | int]
    place: Callable[[str, str | None, str], Wanted]
    ops: list[Op] = field(default_factory=list)
    over_w: bool = False
    cut_into: str | None = None
    parts: int | None = None
    wanted: list[Wanted] = field(default_factory=list)

    def add(self, name: str, **arguments: Any) -> None:
        """One more op; what is at its default is not written."""
        self.ops.append({name: {k: v for k, v in arguments.items() if v is not None}})


def translated(chain: Conversion, operations: Sequence[Any]) -> None:
    """Adds the ops of a converter; `Untold` at the first that has none here."""
    for operation in operations:
        name = type(operation).__name__
        if name not in _KNOWN:
            raise Untold(f"no op does what {name} does")
        _KNOWN[name](chain, operation)
    if chain.over_w and chain.cut_into is None:
        raise Untold("several tensors arrive where one is expected")
    if chain.numbered is not None:
        raise Untold("the numbered tensors are never joined")


def _dim(operation: Any) -> int | None:
    return operation.dim or None


def _stack(chain: Conversion, operation: Any) -> None:
    if chain.numbered is None:
        raise Untold("a list of tensors is joined where the names have no number")
    count, dim = chain.numbered, operation.dim
    chain.shapes = [_inserted(shape, dim, count) for shape in chain.shapes]
    chain.add("stack", dim=_dim(operation), count=chain.count(count))
    chain.numbered = None


def _inserted(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim:])


def _concat(chain: Conversion, operation: Any) -> None:
    dim = operation.dim
    if chain.numbered is not None and chain.over_w:
        raise Untold("two axes are joined at once")
    if chain.numbered is not None:
        count = None
        if operation.num_shards_attribute:
            wanted = chain.place(operation.num_shards_attribute, None, "parts of one tensor")
            chain.wanted.append(wanted)
            count = f"${wanted.name}"
        chain.add("concat", dim=_dim(operation), count=count)
        chain.shapes = [_resized(s, dim, s[dim] * chain.numbered) for s in chain.shapes]
        chain.numbered = None
    elif chain.over_w:
        lengths = [shape[dim] for shape in chain.shapes]
        sizes = lengths if len(set(lengths)) > 1 else None
        chain.add("concat", dim=_dim(operation), sizes=sizes)
        chain.shapes = [_resized(chain.shapes[0], dim, sum(lengths))]
        chain.over_w = False


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if i == dim % len(shape) else n for i, n in enumerate(shape))


def _cut(chain: Conversion, sizes: list[int] | None, operation: Any) -> None:
    """Into the targets, which `w` numbers from here on."""
    shape, dim = chain.shapes[0], operation.dim
    if chain.over_w or chain.numbered is not None:
        raise Untold("several tensors are cut at once")
    lengths = sizes or [shape[dim] // len(chain.targets)] * len(chain.targets)
    if sum(lengths) != shape[dim]:
        raise Untold(f"an axis of length {shape[dim]} is not cut into {lengths}")
    chain.add("split", dim=_dim(operation), sizes=sizes)
    chain.shapes = [_resized(shape, dim, n) for n in lengths]
    chain.labels, chain.over_w, chain.cut_into = chain.targets, True, "w"


def _chunk(chain: Conversion, operation: Any) -> None:
    if not operation.num_shards_attribute:
        return _cut(chain, None, operation)
    wanted = chain.place(operation.num_shards_attribute, None, "parts of one tensor")
    chain.wanted.append(wanted)
    chain.add("split", dim=_dim(operation), count=f"${wanted.name}")
    chain.cut_into, chain.parts = "e", wanted.value
    return None


def _split(chain: Conversion, operation: Any) -> None:
    sizes = [shape[operation.dim] for shape in chain.expected]
    _cut(chain, sizes if len(set(sizes)) > 1 else None, operation)


def _transpose(chain: Conversion, operation: Any) -> None:
    if operation.check_dims and chain.shapes[0] == chain.expected[0]:
        return
    one, other = operation.dim0, operation.dim1
    chain.add("transpose", dims=[one, other])
    for i, shape in enumerate(chain.shapes):
        sizes = list(shape)
        sizes[one], sizes[other] = sizes[other], sizes[one]
        chain.shapes[i] = tuple(sizes)


def _interleave(chain: Conversion, operation: Any) -> None:
    before = "".join(f"{letter} " for letter in "abcdfg"[: operation.dim])
    pairs, halves = f"{before}(x two) ...", f"{before}(two x) ..."
    one, other = (halves, pairs) if operation.inverse else (pairs, halves)
    chain.add("rearrange", pattern=f"{one} -> {other}", axes={"two": 2})


def _rope(chain: Conversion, operation: Any) -> None:
    names = operation.permute_layer_names
    chosen = [
        i for i, label in enumerate(chain.labels)
        if names is None or any(name in label for name in names)
    ]  # fmt: skip
    if not chosen or any(len(chain.shapes[i]) > 2 for i in chosen):
        return
    pairs, halves = "(h d two) ...", "(h two d) ..."
    one, other = (halves, pairs) if operation.inverse else (pairs, halves)
    part = operation.subconfig_key
    heads = chain.place("num_attention_heads", part, "attention heads")
    chain.wanted.append(heads)
    only = chosen if len(chosen) < len(chain.labels) else None
    axes = {"h": f"${heads.name}", "two": 2}
    chain.add("rearrange", pattern=f"{one} -> {other}", axes=axes, only=only)


def _flatten(chain: Conversion, operation: Any) -> None:
    shape = chain.shapes[0]
    if len(shape) == 5:
        _kernel(chain, operation, "o c t h w -> o (c t h w)")
        chain.shapes = [(shape[0], prod(shape[1:]))]


def _unflatten(chain: Conversion, operation: Any) -> None:
    _kernel(chain, operation, "o (c t h w) -> o c t h w")
    chain.shapes = [(chain.shapes[0][0], operation.in_channels, *operation.kernel_size)]


def _kernel(chain: Conversion, operation: Any, pattern: str) -> None:
    sizes = (operation.in_channels, *operation.kernel_size)
    chain.add("rearrange", pattern=pattern, axes=dict(zip("cthw", sizes, strict=True)))


_KNOWN: dict[str, Callable[[Conversion, Any], None]] = {
    "MergeModulelist": _stack,
    "Concatenate": _concat,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _rope,
    "Conv3dToLinear": _flatten,
    "LinearToConv3d": _unflatten,
}
