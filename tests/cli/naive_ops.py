"""The ops of the rule language over whole tensors in memory, for the witness in `naive_rules`:
written from docs/reference/rules.md alone.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


class Refused(Exception):
    """What docs/reference/rules.md calls an error; the text is the kind of problem."""


# --- dtypes ---------------------------------------------------------------------------------------

# bits, bits of the exponent, bits of the mantissa, has infinities
FLOATS = {
    "float64": (64, 11, 52, True),
    "float32": (32, 8, 23, True),
    "float16": (16, 5, 10, True),
    "bfloat16": (16, 8, 7, True),
    "float8_e5m2": (8, 5, 2, True),
    "float8_e4m3fn": (8, 4, 3, False),
}
INTEGERS = {
    "int8": (8, True),
    "int16": (16, True),
    "int32": (32, True),
    "int64": (64, True),
    "uint8": (8, False),
    "bool": (8, False),
}
BITS = {name: bits for name, (bits, *_) in (FLOATS | INTEGERS).items()}


def unsigned(dtype: str) -> np.dtype:
    return np.dtype(f"<u{BITS[dtype] // 8}")


@dataclass(frozen=True)
class Tensor:
    dtype: str
    bits: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    def equals(self, other: Tensor) -> bool:
        return (
            self.dtype == other.dtype
            and self.shape == other.shape
            and bool((self.bits == other.bits).all())
        )

    def with_bits(self, bits: np.ndarray) -> Tensor:
        return Tensor(self.dtype, bits)


@functools.cache
def positive_numbers(dtype: str) -> np.ndarray:
    """The finite numbers of 0 and more of a float dtype of 16 bits or fewer, in the order of their
    codes.
    """
    bits, exponents, mantissa, infinities = FLOATS[dtype]
    bias = 2 ** (exponents - 1) - 1
    out = []
    for code in range(2 ** (bits - 1)):
        exponent, fraction = code >> mantissa, code & (2**mantissa - 1)
        if exponent == 2**exponents - 1 and (infinities or fraction == 2**mantissa - 1):
            break
        scale = 2.0 ** (max(exponent, 1) - bias - mantissa)
        out.append((fraction + (2**mantissa if exponent else 0)) * scale)
    return np.array(out)


def nan_fields(dtype: str) -> tuple[int, int, int]:
    """(the code of the exponent of NaNs, mantissa bits, the sign bit) of a float dtype with
    infinities.
    """
    bits, exponents, mantissa, _ = FLOATS[dtype]
    return (2**exponents - 1) << mantissa, mantissa, 1 << (bits - 1)


def numbers(tensor: Tensor) -> np.ndarray:
    """The elements as int64, or as float64, which holds all of every float dtype."""
    if tensor.dtype in INTEGERS:
        bits, signed = INTEGERS[tensor.dtype]
        return tensor.bits.view(f"<{'i' if signed else 'u'}{bits // 8}").astype(np.int64)
    if tensor.dtype == "float64":
        return tensor.bits.view("<f8")
    if tensor.dtype == "float32":
        with np.errstate(invalid="ignore"):
            return tensor.bits.view("<f4").astype(np.float64)
    table = positive_numbers(tensor.dtype)
    bits = FLOATS[tensor.dtype][0]
    rest = np.full(2 ** (bits - 1) - len(table), np.nan)
    if FLOATS[tensor.dtype][3]:
        rest[0] = np.inf
    half = np.concatenate([table, rest])
    return np.concatenate([half, -half])[tensor.bits]


def is_nan(tensor: Tensor) -> np.ndarray:
    return np.isnan(numbers(tensor)) if tensor.dtype in FLOATS else np.zeros(tensor.shape, bool)


def encode_float(x: np.ndarray, dtype: str) -> np.ndarray:
    """The codes of float64 numbers (no NaN among them that counts), rounded to the nearest, ties to
    even.
    """
    bits, _, _, infinities = FLOATS[dtype]
    if dtype == "float64":
        return np.array(x, "<f8").view("<u8")
    if dtype == "float32":
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return np.array(x.astype("<f4")).view("<u4")
    if not infinities and np.isinf(x).any():
        raise Refused("an infinity that the dtype does not have")
    table = positive_numbers(dtype)
    half_steps = (table[1:] + table[:-1]) / 2
    size = np.where(np.isnan(x), 0, np.abs(x))
    low = np.searchsorted(half_steps, size, side="left")
    high = np.searchsorted(half_steps, size, side="right")
    code = np.where(low == high, low, np.where(low % 2 == 0, low, high))
    if bits > 8:
        beyond = size >= table[-1] + (table[-1] - table[-2]) / 2
        code = np.where(beyond, len(table), code)
    elif infinities:
        code = np.where(np.isinf(x), len(table), code)
    return (code | (np.signbit(x).astype(np.int64) << (bits - 1))).astype(unsigned(dtype))


def carried_nans(tensor: Tensor, dtype: str) -> np.ndarray:
    """For each element the code in `dtype` of the NaN that it is; what is no NaN becomes
    anything.
    """
    bits = tensor.bits.astype(np.uint64)
    width = BITS[tensor.dtype]
    sign = (bits >> np.uint64(width - 1)) << np.uint64(BITS[dtype] - 1)
    if not FLOATS[dtype][3]:
        return sign | np.uint64(0x7F)
    before, after = FLOATS[tensor.dtype][2], FLOATS[dtype][2]
    payload = bits & np.uint64(2**before - 1)
    if not FLOATS[tensor.dtype][3]:  # e4m3fn has one NaN and no payload
        payload = np.full_like(payload, 1 << (before - 1))
    if after >= before:
        fits, moved = np.ones(bits.shape, bool), payload << np.uint64(after - before)
    else:
        moved = payload >> np.uint64(before - after)
        fits = (moved << np.uint64(before - after)) == payload
    quiet = np.uint64(1 << (after - 1))
    return sign | np.uint64(nan_fields(dtype)[0]) | np.where(fits, moved, quiet)


def from_integers(values: np.ndarray, dtype: str) -> np.ndarray:
    bits, signed = INTEGERS[dtype]
    low, high = (
        (0, 1)
        if dtype == "bool"
        else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if signed
        else (0, 2**bits - 1)
    )
    if values.size and (values.min() < low or values.max() > high):
        raise Refused("an integer beyond the dtype")
    return values.astype(f"<{'i' if signed else 'u'}{bits // 8}").view(unsigned(dtype))


def cast(tensor: Tensor, dtype: str, exact: bool) -> Tensor:
    if dtype == tensor.dtype:
        return tensor
    x = numbers(tensor)
    if dtype in INTEGERS:
        if tensor.dtype in FLOATS:
            if not (
                np.isfinite(x).all() and (x == np.trunc(x)).all() and (np.abs(x) < 2.0**62).all()
            ):
                raise Refused("a number that is no such integer")
            if (np.signbit(x) & (x == 0)).any():
                raise Refused("a zero with a sign, which integers do not have")
            x = x.astype(np.int64)
        return Tensor(dtype, from_integers(x, dtype))
    if tensor.dtype in INTEGERS:
        if (np.abs(x) > 2**53).any():
            raise NotImplementedError("the sets have no such integers")
        bits = encode_float(x.astype(np.float64), dtype)
        if (numbers(Tensor(dtype, bits)) != x).any():
            raise Refused("an integer that the float does not hold")
        return Tensor(dtype, bits)
    bits = encode_float(x, dtype)
    nan = is_nan(tensor)
    out = Tensor(dtype, np.where(nan, carried_nans(tensor, dtype), bits).astype(unsigned(dtype)))
    if exact and not cast(out, tensor.dtype, False).equals(tensor):
        raise Refused("rounded though exact")
    return out


def affine(tensor: Tensor, mul: float, add: float, exact: bool) -> Tensor:
    wide = np.float64 if tensor.dtype == "float64" else np.float32
    with np.errstate(all="ignore"):
        x = numbers(tensor).astype(wide)
        y = x * wide(mul)
        if add:
            y = y + wide(add)
    bits = encode_float(y.astype(np.float64), tensor.dtype)
    sign = np.array(1 << (BITS[tensor.dtype] - 1), unsigned(tensor.dtype))
    nan = is_nan(tensor)
    bits = np.where(nan, tensor.bits ^ (sign if mul < 0 else sign * 0), bits).astype(
        tensor.bits.dtype
    )
    out = tensor.with_bits(bits)
    if np.isnan(y[~nan]).any():
        raise NotImplementedError("the sets make no new NaN")
    if exact and not affine(out, 1 / mul, 0, False).equals(tensor):
        raise Refused("rounded though exact")
    return out


def one_number(value: float, dtype: str) -> np.ndarray:
    """A 0-d array of the code of a number, which the dtype must hold."""
    if dtype in INTEGERS:
        if value != int(value):
            raise Refused("a number that is not an integer")
        return from_integers(np.array(int(value)), dtype)
    bits = encode_float(np.array(float(value)), dtype)
    if numbers(Tensor(dtype, bits)) != value:
        raise Refused("a number that the dtype does not hold")
    return bits


ALLOWED = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def integer(said: Any, params: Mapping[str, Any]) -> int:
    """An integer, or what arithmetic over params makes; a division that leaves a rest is
    refused.
    """
    if isinstance(said, int):
        return said

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.FloorDiv) and (right == 0 or left % right):
                raise Refused("a division that leaves a rest")
            return ALLOWED[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        return int(node.value)  # type: ignore[attr-defined]

    return value(
        ast.parse(
            re.sub(r"\$(\w+)", lambda m: str(params[m[1]]), str(said)).strip(), mode="eval"
        ).body
    )


def resolved(said: Any, params: Mapping[str, Any]) -> Any:
    return params[said[1:]] if isinstance(said, str) and said.startswith("$") else said


def axis(said: Any, ndim: int, params: Mapping[str, Any]) -> int:
    dim = integer(said, params)
    if not -ndim <= dim < ndim:
        raise Refused("an axis that is not there")
    return dim % ndim


def wanted_sizes(
    arguments: Mapping[str, Any], params: Mapping[str, Any], values: Sequence[Any]
) -> list[int] | None:
    sizes = resolved(arguments.get("sizes"), params)
    if sizes is None:
        return None
    if isinstance(sizes, Mapping):
        if all(isinstance(value, int) for value in values):
            raise Refused("sizes by value of a capture that does not list its values")
        listed = {str(value): integer(size, params) for value, size in sizes.items()}
        if set(listed) != set(map(str, values)):
            raise Refused("sizes of other values")
        return [listed[str(value)] for value in values]
    if len(sizes) != len(values):
        raise Refused("sizes of another count")
    return [integer(size, params) for size in sizes]


def stack(
    members: list[Tensor],
    arguments: Mapping[str, Any],
    params: Mapping[str, Any],
    values: Sequence[Any],
) -> Tensor:
    if len({t.shape for t in members}) > 1:
        raise Refused("shapes that differ")
    dim = axis(arguments.get("dim", 0), len(members[0].shape) + 1, params)
    return members[0].with_bits(np.stack([t.bits for t in members], dim))


def concat(
    members: list[Tensor],
    arguments: Mapping[str, Any],
    params: Mapping[str, Any],
    values: Sequence[Any],
) -> Tensor:
    if len({len(t.shape) for t in members}) > 1:
        raise Refused("shapes that differ")
    dim = axis(arguments.get("dim", 0), len(members[0].shape), params)
    if len({t.shape[:dim] + t.shape[dim + 1 :] for t in members}) > 1:
        raise Refused("shapes that differ elsewhere")
    lengths = [t.shape[dim] for t in members]
    sizes = wanted_sizes(arguments, params, values)
    if (sizes is None and len(set(lengths)) > 1) or (sizes is not None and sizes != lengths):
        raise Refused("parts of another length")
    return members[0].with_bits(np.concatenate([t.bits for t in members], dim))


def same(
    members: list[Tensor],
    arguments: Mapping[str, Any],
    params: Mapping[str, Any],
    values: Sequence[Any],
) -> Tensor:
    if not all(t.equals(members[0]) for t in members):
        raise Refused("members that are not equal")
    return members[0]


def unbind(
    tensor: Tensor,
    arguments: Mapping[str, Any],
    params: Mapping[str, Any],
    values: Sequence[Any] | None,
) -> list[Tensor]:
    dim = axis(arguments.get("dim", 0), len(tensor.shape), params)
    length = tensor.shape[dim]
    if length == 0 or (values is not None and length != len(values)):
        raise Refused("an axis of another length")
    return [tensor.with_bits(np.take(tensor.bits, i, dim)) for i in range(length)]


def split(
    tensor: Tensor,
    arguments: Mapping[str, Any],
    params: Mapping[str, Any],
    values: Sequence[Any] | None,
) -> list[Tensor]:
    assert values is not None
    dim = axis(arguments.get("dim", 0), len(tensor.shape), params)
    length, sizes = tensor.shape[dim], wanted_sizes(arguments, params, values)
    if sizes is None:
        if length % len(values):
            raise Refused("an axis that is not so many equal parts")
        sizes = [length // len(values)] * len(values)
    if sum(sizes) != length:
        raise Refused("sizes that do not make up the axis")
    out, at = [], 0
    for size in sizes:
        out.append(tensor.with_bits(np.take(tensor.bits, range(at, at + size), dim)))
        at += size
    return out


def copy(
    tensor: Tensor,
    arguments: Mapping[str, Any],
    params: Mapping[str, Any],
    values: Sequence[Any] | None,
) -> list[Tensor]:
    assert values is not None
    return [tensor] * len(values)


Each = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any], Sequence[str]], Tensor]


def transpose(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    one, other = (axis(d, len(t.shape), params) for d in a["dims"])
    return t.with_bits(np.swapaxes(t.bits, one, other))


def permute(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    dims = [axis(d, len(t.shape), params) for d in a["dims"]]
    if sorted(dims) != list(range(len(t.shape))):
        raise Refused("axes that are not all of them")
    return t.with_bits(np.transpose(t.bits, dims))


def flip(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    return t.with_bits(np.flip(t.bits, axis(a["dim"], len(t.shape), params)))


def roll(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    dim = axis(a["dim"], len(t.shape), params)
    length = t.shape[dim]
    source = [(i - integer(a["shift"], params)) % length for i in range(length)]
    return t.with_bits(np.take(t.bits, source, dim)) if length else t


def squeeze(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    dim = axis(a["dim"], len(t.shape), params)
    if t.shape[dim] != 1:
        raise Refused("an axis of another length than 1")
    return t.with_bits(np.squeeze(t.bits, dim))


def unsqueeze(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    return t.with_bits(np.expand_dims(t.bits, axis(a["dim"], len(t.shape) + 1, params)))


def reshape(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    def shape(said: Any) -> list[int]:
        sizes = [integer(one, params) for one in resolved(said, params)]
        known = int(np.prod([size for size in sizes if size != -1], dtype=np.int64))
        if sizes.count(-1) > 1 or (-1 in sizes and (known == 0 or t.bits.size % known)):
            raise Refused("a length that does not follow")
        return [t.bits.size // known if size == -1 else size for size in sizes]

    if "from" in a and tuple(shape(a["from"])) != t.shape:
        raise Refused("another shape before")
    to = shape(a["to"])
    if np.prod(to, dtype=np.int64) != t.bits.size:
        raise Refused("another number of elements")
    return t.with_bits(np.ascontiguousarray(t.bits).reshape(to))


def rearrange(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    left, right = (
        [
            word[1:-1].split() if word.startswith("(") else [word]
            for word in re.findall(r"\([^()]*\)|\.\.\.|\w+", side)
        ]
        for side in a["pattern"].split("->")
    )
    sizes = {name: integer(size, params) for name, size in a.get("axes", {}).items()}
    if any(size < 1 for size in sizes.values()):
        raise Refused("a length of less than 1")
    fixed = sum(group != ["..."] for group in left)
    if ["..."] in left:
        if len(t.shape) < fixed:
            raise Refused("fewer axes than the pattern has")
        others = [[f"... {i}"] for i in range(len(t.shape) - fixed)]
        left, right = (
            [g for group in side for g in (others if group == ["..."] else [group])]
            for side in (left, right)
        )
    if len(left) != len(t.shape):
        raise Refused("another number of axes")
    for group, length in zip(left, t.shape, strict=True):
        names = [name for name in group if name != "1"]
        unknown = [name for name in names if name not in sizes]
        known = int(np.prod([sizes[name] for name in names if name in sizes], dtype=np.int64))
        if (
            len(unknown) > 1
            or (unknown and (known == 0 or length % known))
            or (not unknown and known != length)
        ):
            raise Refused("lengths that do not fit")
        if unknown:
            sizes[unknown[0]] = length // known
    order = [name for group in left for name in group if name != "1"]
    after = [name for group in right for name in group if name != "1"]
    bits = np.ascontiguousarray(t.bits).reshape([sizes[name] for name in order])
    bits = np.transpose(bits, [order.index(name) for name in after])
    shape = [
        int(np.prod([sizes[name] for name in group if name != "1"], dtype=np.int64))
        for group in right
    ]
    return t.with_bits(np.ascontiguousarray(bits).reshape(shape))


def cut_out(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    dim = axis(a["dim"], len(t.shape), params)
    length = t.shape[dim]
    start, stop = integer(a.get("start", 0), params), integer(a.get("stop", length), params)
    if "of" in a and integer(a["of"], params) != length:
        raise Refused("another length before")
    if not 0 <= start <= stop <= length:
        raise Refused("a range that is not there")
    rest = [i for i in range(length) if not start <= i < stop]
    if "value" in a:
        value = one_number(resolved(a["value"], params), t.dtype)
        if (np.take(t.bits, rest, dim) != value).any():
            raise Refused("what is cut is not that value")
    if not ("value" in a and "of" in a) and "drop" not in allow:
        raise Refused("a slice that does not say what it cuts is not allowed")
    return t.with_bits(np.take(t.bits, range(start, stop), dim))


def pad(t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]) -> Tensor:
    dim = axis(a["dim"], len(t.shape), params)
    length, start = t.shape[dim], integer(a.get("start", 0), params)
    if "of" in a and integer(a["of"], params) != length:
        raise Refused("another length before")
    if "size" in a:
        size = integer(a["size"], params)
    else:
        unit = integer(a["multiple_of"], params)
        size = -(-(start + length) // unit) * unit
    if size < start + length:
        raise Refused("a size that is too small")
    value = one_number(resolved(a.get("value", 0), params), t.dtype)
    shape = (*t.shape[:dim], size, *t.shape[dim + 1 :])
    bits = np.full(shape, value, t.bits.dtype)
    bits[(slice(None),) * dim + (slice(start, start + length),)] = t.bits
    return t.with_bits(bits)


def do_cast(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    if "from" in a and a["from"] != t.dtype:
        raise Refused("another dtype before")
    if t.dtype in FLOATS and a["to"] in FLOATS and not a.get("exact"):
        (_, e, m, _), (_, f, n, _) = FLOATS[t.dtype], FLOATS[a["to"]]
        if (e > f or m > n) and "lossy" not in allow:
            raise Refused("rounding is not allowed")
    return cast(t, a["to"], bool(a.get("exact")))


def do_affine(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    if t.dtype not in FLOATS or FLOATS[t.dtype][0] < 16:
        raise Refused("a dtype that affine does not compute with")
    mul, add, exact = (
        resolved(a.get("mul", 1), params),
        resolved(a.get("add", 0), params),
        bool(a.get("exact")),
    )
    if not exact and (add or mul not in (1, -1)) and "lossy" not in allow:
        raise Refused("rounding is not allowed")
    return affine(t, mul, add, exact)


def fill(
    t: Tensor, a: Mapping[str, Any], params: Mapping[str, Any], allow: Sequence[str]
) -> Tensor:
    value = one_number(resolved(a["value"], params), a["dtype"])
    return Tensor(
        a["dtype"],
        np.full(
            [integer(size, params) for size in resolved(a["shape"], params)],
            value,
            unsigned(a["dtype"]),
        ),
    )


JOIN: dict[
    str, Callable[[list[Tensor], Mapping[str, Any], Mapping[str, Any], Sequence[Any]], Tensor]
] = {
    "stack": stack,
    "concat": concat,
    "same": same,
}
PART: dict[
    str,
    Callable[[Tensor, Mapping[str, Any], Mapping[str, Any], Sequence[Any] | None], list[Tensor]],
] = {
    "unbind": unbind,
    "split": split,
    "copy": copy,
    "tie": copy,
}
EACH: dict[str, Each] = {
    "transpose": transpose,
    "permute": permute,
    "flip": flip,
    "roll": roll,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "reshape": reshape,
    "rearrange": rearrange,
    "slice": cut_out,
    "pad": pad,
    "cast": do_cast,
    "affine": do_affine,
    "fill": fill,
}
