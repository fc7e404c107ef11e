"""What bitsandbytes stores beside codes of 4 bits: the table that they look up, and JSON
(`QuantState.as_dict`), which is read with limits, and written.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from math import prod
from typing import Any, NamedTuple

from ...core.errors import MigrateError, OpError, printable
from ...core.spec import Spec
from .samples import bytes_part, random_part

# the number of each code, all of them float32 numbers (bitsandbytes 0.50 `get_4bit_type`)
TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
        0.1666666716337204, 0.25, 0.0, -0.0052083334885537624, -0.6666666865348816, -1.0,
        -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
}  # fmt: skip
# roles of what scales have that are codes themselves
NESTED = ("nested_absmax", "nested_map")
# how many numbers may share a scale where bitsandbytes encodes
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# of a length or a block that JSON says, and of axes
MOST, MOST_AXES = 1 << 48, 64


class QuantState(NamedTuple):
    """Whose codes they are, how many numbers share a scale, and the shape of all numbers; `nested`:
    how many scales share one of their own, and what is added to each.
    """

    form: str
    blocksize: int
    shape: tuple[int, ...]
    nested: tuple[int, float] | None = None

    def check(self, name: str, wanted: Mapping[str, Any], roles: Collection[str]) -> None:
        """OpError for the codec `name`: M310 if a rule wants another form or blocksize, or one of
        NESTED is among the roles that the state says nothing of; M408 if one is not that it tells
        of.
        """
        for key, value in wanted.items():
            if value not in (None, found := getattr(self, key)):
                raise OpError("M310", f"{name}: `{key}` is {value}, the state says {found}")
        for role in NESTED:
            if self.nested is not None and role not in roles:
                raise OpError("M408", f"{name}: the state says that there is a {role}")
            if self.nested is None and role in roles:
                raise OpError("M310", f"{name}: the state says nothing of the {role} beside it")


def read_state(name: str, data: bytes) -> QuantState:
    """What the bytes say. OpError M310, for the codec `name`, where they are no JSON object, lack
    something or say what cannot be.
    """
    from ...source.jsontext import parse

    try:
        said = parse(data, "the state", floats=True)
    except MigrateError as error:
        raise OpError("M310", f"{name}: {error.diagnostics[0].message}") from None
    if not isinstance(said, dict):
        raise OpError("M310", f"{name}: the state is not a JSON object")
    form = said.get("quant_type")
    if form not in tuple(TABLES):
        raise _wrong(name, "quant_type", form, " or ".join(TABLES))
    nested = None
    # bitsandbytes writes all of these or none
    if any(key.startswith("nested_") for key in said):
        nested = _whole(name, said, "nested_blocksize"), _offset(name, said)
    return QuantState(form, _whole(name, said, "blocksize"), _shape(name, said), nested)


def state_bytes(form: str, blocksize: int, spec: Spec) -> dict[str, bytes]:
    """The bytes of `map` and `state` beside scales that are not nested, for numbers of `spec`."""
    said = {"quant_type": form, "blocksize": blocksize, "dtype": spec.dtype, "shape": spec.shape}
    return {"map": struct.pack("<16f", *TABLES[form]), "state": json.dumps(said).encode()}


def state_parts(shape: tuple[int, ...], blocksize: int, inner: int = 0) -> list[Any]:
    """Parts of random codes to test decoding with, in the order of the codec's; `inner` scales
    share one of their own, 0: they are not nested.
    """
    count = prod(shape)
    blocks = -(-count // blocksize)
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize, "shape": shape}
    absmax = random_part("float32", blocks)
    more: list[Any] = [None, None]
    if inner:
        said |= {"nested_blocksize": inner, "nested_offset": 0.1}
        absmax = random_part("uint8", blocks)
        more = [random_part("float32", n) for n in (-(-blocks // inner), 256)]
    codes, state = random_part("uint8", -(-count // 2), 1), json.dumps(said).encode()
    return [codes, absmax, random_part("float32", 16), bytes_part(state), *more]


def _wrong(name: str, key: str, found: Any, wanted: str) -> OpError:
    text = printable(repr(found), 60)
    return OpError("M310", f"{name}: {key} of the state is {text}, not {wanted}")


def _whole(name: str, said: Mapping[str, Any], key: str) -> int:
    if not _is_length(found := said.get(key)) or not found:
        raise _wrong(name, key, found, f"an integer from 1 to {MOST:,}")
    return int(found)


def _shape(name: str, said: Mapping[str, Any]) -> tuple[int, ...]:
    found = said.get("shape")
    if isinstance(found, list) and len(found) <= MOST_AXES and all(map(_is_length, found)):
        return tuple(found)
    wanted = f"a list of at most {MOST_AXES} integers from 0 to {MOST:,}"
    raise _wrong(name, "shape", found, wanted)


def _is_length(found: Any) -> bool:
    return type(found) is int and 0 <= found <= MOST


def _offset(name: str, said: Mapping[str, Any]) -> float:
    """The offset in float32, in which bitsandbytes adds it."""
    found = said.get("nested_offset")
    if isinstance(found, int | float) and type(found) is not bool and abs(found) < 2.0**127:
        return float(struct.unpack("<f", struct.pack("<f", found))[0])
    raise _wrong(name, "nested_offset", found, "a finite number of float32")
