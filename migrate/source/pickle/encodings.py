"""How a tensor that a library pickles as an object is spread over plain tensors, and what its
numbers are.

Transformer Engine says the dtype of its bytes by an integer of a C++ enum, and the integers
changed: 7 was E5M2 and is E4M3. Which of them is meant follows from how the object was made where
the call tells releases apart, or from another object of the same file, because one process wrote
all of it. Where nothing tells, both readings are kept and whoever needs one must ask: a wrong one
gives numbers that look sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import fail, listed, option, printable

# of each numbering, named by the first release that has it, the dtypes that quantized tensors are
# of
NUMBERINGS: dict[str, dict[int, str]] = {
    "0.8": {6: "float8_e4m3fn", 7: "float8_e5m2"},
    "2.4": {7: "float8_e4m3fn", 8: "float8_e5m2", 10: "float4_e2m1fn"},
}
OLD, NEW = tuple(NUMBERINGS)
PARAMETER = "te_dtype_numbering"


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a quantized tensor is made of.

    `format` is a word such as "te-mxfp8"; `name` is the class. `shape` and `dtype` (torch's name)
    are those of the tensor it stands for. `roles` has the component of each role, by the ending of
    its key: `{"data": "_rowwise_data", "scale": "_rowwise_scale_inv"}`. `number` is the dtype of
    one stored number, None while `readings` (numbering -> dtype) are more than one; `code` is the
    integer in the file. `block` is how many elements of rows and columns share a scale, None for
    all of them. `members` > 0: so many tensors of `shape[1:]` in one. `options` are the other
    scalars that the object was saved with.
    """

    format: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    roles: Mapping[str, str]
    number: str | None = None
    code: int | None = None
    readings: Mapping[str, str] | None = None
    block: tuple[int, int] | None = None
    members: int = 0
    options: Mapping[str, Any] | None = None

    def read_as(self, numbering: str) -> Encoding:
        """The encoding with its integer read in one of `NUMBERINGS`; as it is where that is known,
        or cannot be.
        """
        if self.number is not None or not self.readings or numbering not in self.readings:
            return self
        return replace(
            self, number=self.readings[numbering], readings={numbering: self.readings[numbering]}
        )

    def described(self) -> dict[str, Any]:
        """A JSON value for people: what the object is, and which tensors it is made of. `readings`
        only where they are several.
        """
        return {
            "object": self.name,
            "format": self.format,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "number": self.number,
            "readings": dict(self.readings or {}) if self.number is None else {},
            "block": None if self.block is None else list(self.block),
            "members": self.members,
            "roles": dict(self.roles),
            "options": {
                name: value for name, value in (self.options or {}).items() if value is not None
            },
        }


def readings(code: int, numberings: tuple[str, ...]) -> dict[str, str]:
    """What an integer can mean in these numberings: only the dtypes that quantized tensors have."""
    return {name: NUMBERINGS[name][code] for name in numberings if code in NUMBERINGS[name]}


def settled(encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """The encodings of one file, with integers read as the other objects of the file leave no doubt
    about.

    One process writes a file, so all its objects have one numbering. Where the objects contradict
    each other nothing is concluded.
    """
    common = set(NUMBERINGS)
    for encoding in encodings.values():
        if encoding.readings:
            common &= set(encoding.readings)
    if len(common) != 1:
        return dict(encodings)
    (numbering,) = common
    return {key: encoding.read_as(numbering) for key, encoding in encodings.items()}


def numbering(said: Any) -> str:
    """What a person says of the integers, as one of `NUMBERINGS`. M955 for anything else."""
    if str(said) not in NUMBERINGS:
        fail(
            "M955", f"`{PARAMETER}` is {printable(str(said))}; there are {listed(list(NUMBERINGS))}"
        )
    return str(said)


def answered(encodings: Mapping[str, Encoding], numbering: str | None) -> dict[str, Encoding]:
    """The encodings of one file, settled, and what that leaves open read as a person says:
    `numbering`, None where nobody did.

    M955 for a numbering that the objects of the file leave no room for.
    """
    found = settled(encodings)
    if numbering is None:
        return found
    told = [key for key, encoding in found.items() if encoding.readings]
    other = [key for key in told if numbering not in (found[key].readings or {})]
    if other and len(other) == len(told):
        (is_,) = found[other[0]].readings or {}
        fail(
            "M955",
            f"`{PARAMETER}` is {numbering}, and the integers in the file are those of {is_}: "
            f"{listed(other, 4)}",
            help="leave it out: the file leaves no doubt",
        )
    return {key: encoding.read_as(numbering) for key, encoding in found.items()}


def ask(encodings: Mapping[str, Encoding]) -> None:
    """M955 naming the keys whose integer has two readings, and how a person says which is meant."""
    open_ = [
        key for key, encoding in encodings.items() if encoding.number is None and encoding.readings
    ]
    if open_:
        one = encodings[open_[0]]
        ways = ", ".join(
            f"{dtype} in {release} and later" for release, dtype in (one.readings or {}).items()
        )
        fail(
            "M955",
            f"of {len(open_)} quantized tensors of Transformer Engine the dtype is {one.code}, "
            f"which is {ways}: {listed(open_, 4)}",
            help=f"say which release wrote them: {option('params', f'{PARAMETER}=0.8')} for one "
            "up to 2.3, "
            f"{option('params', f'{PARAMETER}=2.4')} for 2.4 or later",
        )
