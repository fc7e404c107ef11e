"""Codecs as third parties write them: `acme-ints` has arguments of its own, parts that need not be
there and one whose bytes give the shape; `acme-table` is only decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np
import pytest

from migrate import codecs
from migrate.codecs.base import (
    ACTIVATION_SCALES,
    Codec,
    Convention,
    Dtype,
    Flag,
    Integer,
    OpError,
    arg,
    dataclass,
)
from migrate.core.spec import Spec


class Ints(Codec):
    """float32 numbers as integers of `bits` bits: (code - zero) * scale. Codes of four bits lie two
    in a byte, low first, and an odd row says its length in `shape`.
    """

    name = "acme-ints"
    summary = "integers of 4 or 8 bits with a scale for each group of a row, or for all"
    parts = ("weight", "scale", "zero", "shape")
    optional = ("zero", "shape")
    planning = ("shape",)
    unused = ACTIVATION_SCALES
    numbers = ("float32",)
    names = (
        Convention(
            "acme",
            {
                "weight": "{w}.codes",
                "scale": "{w}.scales",
                "zero": "{w}.zeros?",
                "shape": "{w}.length?",
            },
        ),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        bits: Integer = arg("bits of a code", values=(4, 8))
        group: Integer | None = arg(
            "numbers of a row that share a scale; without it all of the tensor do",
            least=1,
            default=None,
        )
        symmetric: Flag = arg("codes have no zero point", encoding=True, default=True)
        dtype_of_shape: Dtype = arg("what the lengths are", encoding=True, default="int64")

    @dataclass(frozen=True, slots=True)
    class Read:
        """The arguments with the length of a row."""

        bits: int
        group: int | None
        columns: int

    def settle(self, args, specs, values):
        weight, each = specs[0], 8 // args.bits
        if len(weight.shape) != 2:
            raise OpError("M304", f"the codes are {weight}, not a matrix")
        columns = weight.shape[-1] * each
        if "shape" in values:
            shape = np.frombuffer(values["shape"], "<i8" if specs[3].dtype == "int64" else "<i4")
            if len(shape) != 2 or (shape[0], -(-shape[1] // each)) != weight.shape:
                raise OpError(
                    "M310", f"`shape` says {shape.tolist()}, the codes are {list(weight.shape)}"
                )
            columns = int(shape[1])
        return self.Read(args.bits, args.group, columns)

    def decoded(self, args, specs, dtype):
        weight, scale, zero, _ = specs
        if weight.dtype != "uint8" or len(weight.shape) != 2:
            raise OpError("M303", f"the codes are {weight}")
        wanted = self._grid(args, (weight.shape[0], args.columns))
        for role, part in (("scale", scale), ("zero", zero)):
            if part is not None and part.shape != wanted:
                raise OpError("M310", f"the {role} is {list(part.shape)}, not {list(wanted)}")
        if dtype != "float32":
            raise OpError("M303", f"decoded to float32, not to {dtype}")
        return Spec(dtype, (weight.shape[0], args.columns))

    def _grid(self, args, shape):
        return () if args.group is None else (shape[0], -(-shape[1] // args.group))

    def encoded(self, args, spec):
        if spec.dtype != "float32" or len(spec.shape) != 2:
            raise OpError("M303", f"only float32 matrices can be encoded, not {spec}")
        rows, columns = spec.shape
        grid = self._grid(args, spec.shape)
        packed = args.bits == 4
        return [
            Spec("uint8", (rows, -(-columns // 2) if packed else columns)),
            Spec("float32", grid),
            None if args.symmetric else Spec("uint8", grid),
            Spec(args.dtype_of_shape, (2,)) if packed and columns % 2 else None,
        ]

    def foreseen(self, args, spec):
        kind = "<i8" if args.dtype_of_shape == "int64" else "<i4"
        return {"shape": np.array(spec.shape, kind).tobytes()}

    def making(self, args, roles):
        return self.Args(args.bits, args.group, "zero" not in roles, args.dtype_of_shape)

    def _whole(self, specs):
        return [None if s is None else tuple((0, n) for n in s.shape) for s in specs]

    def decode_needs(self, args, specs, box):
        whole = self._whole(specs)
        rows = (box[0],)
        return [
            None if s is None else w if r == "shape" or not s.shape else rows + w[1:]
            for r, s, w in zip(self.parts, specs, whole, strict=True)
        ]

    def encode_needs(self, args, spec, part, box):
        whole = tuple((0, n) for n in spec.shape)
        return whole if args.group is None or part == 3 else (box[0], whole[1])

    def grain(self, args, spec, part):
        return (1,) * len(spec.shape if part is None else self.encoded(args, spec)[part].shape)

    def decode(self, args, arrays, specs, dtype, box, out, meter=None):
        held = [None if a is None else np.asarray(a) for a in arrays]
        made = self._numbers(args, held, specs)
        np.asarray(out)[...] = made[:, slice(*box[1])].view("<u4")

    def _numbers(self, args, arrays, specs):
        codes, scale, zero, _ = arrays
        if args.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), 2 * codes.shape[1])
        codes = codes[:, : args.columns].astype("<f4")
        spread = self._spread(args, scale.view("<f4"), args.columns)
        middle = np.float32(1 << (args.bits - 1))
        offset = middle if zero is None else self._spread(args, zero, args.columns).astype("<f4")
        return np.ascontiguousarray((codes - offset) * spread, "<f4")

    def _spread(self, args, grid, columns):
        return grid if args.group is None else np.repeat(grid, args.group, -1)[:, :columns]

    def encode(self, args, array, spec, part, box, out, meter=None, memo=None):
        made = self._encoded(args, np.ascontiguousarray(array).view("<f4"))[part]
        if part == 3:
            made = np.array(spec.shape, "<i8" if args.dtype_of_shape == "int64" else "<i4")
            made = made.view("<u8" if args.dtype_of_shape == "int64" else "<u4")
        needed = self.encode_needs(args, spec, part, box)
        first = needed[0][0] if part < 3 and made.ndim else 0
        at = ((box[0][0] - first, box[0][1] - first), *box[1:]) if made.ndim else ()
        np.asarray(out)[...] = made[(*(slice(a, b) for a, b in at), ...)]

    def _encoded(self, args, x):
        rows, columns = x.shape
        most, middle = (1 << args.bits) - 1, 1 << (args.bits - 1)
        if args.group is None:
            groups = x.reshape(1, 1, x.size)
        else:
            many = -(-columns // args.group)
            groups = np.zeros((rows, many * args.group), "<f4")
            groups[:, :columns] = x
            groups = groups.reshape(rows, many, args.group)
        low, high = groups.min(-1, initial=0), groups.max(-1, initial=0)
        if args.symmetric:
            scale = np.maximum(-low, high) / np.float32(middle - 1)
            zero = np.full(low.shape, middle, "u1")
        else:
            scale = (high - low) / np.float32(most)
        scale = np.where(scale > 0, scale, 1).astype("<f4")
        if not args.symmetric:
            zero = np.clip(np.rint(-low / scale), 0, most).astype("u1")
        codes = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], 0, most).astype("u1")
        if args.group is None:
            codes, scale, zero = codes.reshape(x.shape), scale.reshape(()), zero.reshape(())
        else:
            codes = codes.reshape(rows, many * args.group)[:, :columns]
        if args.bits == 4:
            even = np.zeros((rows, -(-columns // 2) * 2), "u1")
            even[:, :columns] = codes
            codes = even[:, 0::2] | even[:, 1::2] << 4
        return [np.ascontiguousarray(codes), scale.view("<u4"), zero, np.zeros(0)]

    def reference(self, args, arrays, specs, dtype):
        return self._numbers(args, arrays, specs).view("<u4")

    def reference_rows(self, args, specs):
        return 1

    def reference_parts(self, args, array, spec):
        specs = self.encoded(args, spec)
        out = []
        for number, part in enumerate(specs):
            if part is None:
                out.append(None)
                continue
            kind = {"uint8": "u1", "float32": "<u4", "int64": "<u8", "int32": "<u4"}[part.dtype]
            made = np.empty(part.shape, kind)
            whole = tuple((0, n) for n in part.shape)
            self.encode(args, array, spec, number, whole, made)
            out.append(made)
        return out

    def bound(self, args):
        return "half a step: |x - y| <= scale / 2"

    def samples(self):
        yield self.Args(8), Spec("float32", (3, 5))
        yield self.Args(8, 4, False), Spec("float32", (4, 10))
        yield self.Args(4, 2), Spec("float32", (3, 6))
        yield self.Args(4, 4, False, "int32"), Spec("float32", (2, 7))


class PerTensor(Codec):
    """Numbers divided by the largest magnitude, which is stored as a scalar."""

    name = "acme-tensor"
    summary = "float32 numbers over one scale"
    parts = ("weight", "scale")
    names = (Convention("test", {"weight": "{w}.weight", "scale": "{w}.scale"}),)

    def decoded(self, args, specs, dtype):
        if specs[1].shape:
            raise OpError("M304", f"the scale is {specs[1]}, it has no axes")
        if dtype != "float32":
            raise OpError("M303", f"decoded to float32, not to {dtype}")
        return Spec(dtype, specs[0].shape)

    def encoded(self, args, of):
        if of.dtype != "float32":
            raise OpError("M303", f"only float32 can be encoded, not {of}")
        return [Spec("float32", of.shape), Spec("float32", ())]

    def decode_needs(self, args, specs, box):
        return [box, ()]

    def encode_needs(self, args, of, part, box):
        return tuple((0, n) for n in of.shape)

    def grain(self, args, of, part):
        return () if part == 1 else (1,) * len(of.shape)

    def decode(self, args, arrays, specs, dtype, box, out, meter=None):
        weight, scale = (np.asarray(a).view("<f4") for a in arrays)
        out[...] = (weight * scale).astype("<f4").view("<u4")

    def encode(self, args, array, of, part, box, out, meter=None, memo=None):
        made = self.reference_parts(args, array, of)[part]
        out[...] = made[(*(slice(a, b) for a, b in box), ...)]

    def reference(self, args, arrays, specs, dtype):
        weight, scale = (np.asarray(a).view("<f4") for a in arrays)
        return np.asarray(weight * scale, "<f4").view("<u4")

    def reference_parts(self, args, array, of):
        x = np.asarray(array).view("<f4")
        scale = np.asarray(np.abs(x).max(initial=0) or 1, "<f4")
        return [np.asarray(x / scale, "<f4").view("<u4"), scale.view("<u4")]

    def bound(self, args):
        return "half a unit in the last place"

    def samples(self):
        yield self.Args(), Spec("float32", (3, 4))


class Table(Codec):
    """The number of a code stands in a table, which is a part."""

    name = "acme-table"
    summary = "bytes that are looked up in a table of 256 numbers"
    parts = ("weight", "table")
    numbers = ("float32",)
    names = (Convention("acme", {"weight": "{w}.indices", "table": "{w}.table"}),)

    def decoded(self, args, specs, dtype):
        weight, table = specs
        if weight.dtype != "uint8" or table != Spec("float32", (256,)):
            raise OpError("M303", f"the parts are {weight} and {table}")
        if dtype != "float32":
            raise OpError("M303", f"decoded to float32, not to {dtype}")
        return Spec(dtype, weight.shape)

    def decode_needs(self, args, specs, box):
        return [box, ((0, 256),)]

    def grain(self, args, spec, part):
        return (1,) * len(spec.shape)

    def decode(self, args, arrays, specs, dtype, box, out, meter=None):
        np.asarray(out)[...] = np.asarray(arrays[1])[np.asarray(arrays[0])]

    def reference(self, args, arrays, specs, dtype):
        return arrays[1][arrays[0]]

    def exact(self, args, specs, dtype):
        return True

    def stored(self):
        rng = np.random.default_rng(0)
        for shape in ((), (5,), (3, 4), (2, 3, 4)):
            codes = rng.integers(0, 256, prod(shape), dtype="u1").reshape(shape)
            table = rng.standard_normal(256).astype("<f4").view("<u4")
            yield (
                self.Args(),
                [(Spec("uint8", shape), codes), (Spec("float32", (256,)), table)],
            )


@contextmanager
def installed(*made: Codec) -> Iterator[None]:
    """These codecs stand in the registry, as if they were built in."""
    registry = codecs.registry
    names = [codec.name.replace("-", "_") for codec in made]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_builtin", tuple(sorted({*registry.builtin(), *names})))
        patch.setattr(registry, "_loaded", {**registry._loaded, **dict(zip(names, made))})
        yield
