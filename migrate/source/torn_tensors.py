"""Quantized tensors of which each rank wrote its shard, where the shards make no whole tensor
without loss.

They stand in the index with the spec that the whole has, so that a checkpoint with such tensors can
be looked at, and rules can leave them out. What would read one is refused, M946, unless its shards
are to be decoded and the whole encoded anew: then each shard is read as the object that it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ..core.errors import Report, option, plural, printable

if TYPE_CHECKING:
    from .pickle.tree import Encoding

REQUANTIZE = "requantize"


class TornShard(NamedTuple):
    """What one rank wrote: where it lies in the tensor, its encoding (None for plain numbers), and
    of each component the number of its chunk among those of the component. Plain numbers stand
    under the name of the tensor's first component.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    encoding: Encoding | None
    chunks: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class TornTensor:
    """A tensor by the name that `.metadata` has for it, what keeps its shards from being one, the
    encoding of the whole, the shards, and the components that are made of them. `anew`: shards
    are decoded, and the whole is encoded.
    """

    name: str
    why: str
    encoding: Encoding
    shards: tuple[TornShard, ...]
    components: tuple[str, ...]
    anew: bool = False

    @property
    def message(self) -> str:
        return (
            f"{printable(self.name)}: its {plural(len(self.shards), 'chunk')} are quantized each "
            f"for itself and make no whole tensor without loss: {self.why}"
        )


class TornPart(NamedTuple):
    """The component `attribute` of a torn tensor."""

    tensor: TornTensor
    attribute: str

    @property
    def anew(self) -> bool:
        return self.tensor.anew

    def siblings(self, key: str) -> dict[str, str]:
        """The keys of all components that are torn, given this one's."""
        stem = key[: len(key) - len(self.attribute)]
        return {name: f"{stem}{name}" for name in self.tensor.components}

    def refuse(self) -> NoReturn:
        """M946: the whole is in no place."""
        refuse_torn([self.tensor])
        raise AssertionError(self.tensor.name)


def part_of(stored: object) -> TornPart | None:
    """What of a torn tensor a `StoredTensor` is; None for all that is whole."""
    return getattr(stored, "torn", None)


def refuse_torn(tensors: Iterable[TornTensor]) -> None:
    """M946 naming each of them; nothing for none."""
    report = Report()
    for one in {id(tensor): tensor for tensor in tensors}.values():
        report.add(
            "M946",
            one.message,
            help="save full_tensor() of it, or save on so many ranks that shards end on borders "
            f"of blocks; {option('params', f'{REQUANTIZE}=PATTERN')} decodes the shards and "
            f"encodes the whole anew, which loses something ({option('allow', 'lossy')})",
        )
    report.check()
