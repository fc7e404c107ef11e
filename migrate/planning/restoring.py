"""What a way back does not return bit for bit: tensors that it makes again out of numbers that were
rounded or encoded, and tensors that it does not make.

The proof of a downgrade composes the way there and the way back into one graph over the source, and
this is read off that graph: what is only moved comes back, and so does what every op on its way
keeps. Of codes and scales that are encoded again only their bytes can tell, so a run that decodes
leaves hashes of them (`running/part_hashes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ops.dequantize import called
from ..source.blobs import chunks_of
from ..source.torn_tensors import REQUANTIZE
from .graph import Computation, Tensor, computations
from .stored import untouched_key

if TYPE_CHECKING:
    from ..source.blobs import StoredTensor
    from .compose import Composition


@dataclass(frozen=True, slots=True)
class HashedParts:
    """Tensors of the checkpoint whose index hash is `source`, by sorted keys, and the hash of each;
    None before they are known.
    """

    source: str
    keys: tuple[str, ...]
    hashes: tuple[bytes, ...] | None = None


@dataclass(frozen=True, slots=True)
class PartsFile:
    """What an output remembers of the tensors that its ways back have to make again: `output` is
    its own index hash, `runs` begin with the oldest.
    """

    output: str
    runs: tuple[HashedParts, ...]


class Lost(NamedTuple):
    """What a way back does not bring back, and what it makes that was not there; sorted keys."""

    keys: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """What tensors that a way back makes should be, by what the way there left: the hash of each by
    its key, or one of all (`together`) where there is no more; neither where nothing says it.
    `required` have to be it.
    """

    keys: tuple[str, ...]
    hashes: Mapping[str, bytes] | None = None
    together: str | None = None
    required: frozenset[str] = frozenset()


def decodes(outputs: Iterable[Tensor]) -> bool:
    """Whether these tensors are made of parts of a number format."""
    seen, todo = set[int](), list(outputs)
    while todo:
        for source in todo.pop().sources:
            call = getattr(source, "computation", None)
            # an object that was encoded anew has no way back to its shards
            if call is None or id(call) in seen or call.rule == REQUANTIZE:
                continue
            if call.op_call.op == "dequantize":
                return True
            seen.add(id(call))
            todo += call.inputs
    return False


def made_again(composition: Composition, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The keys that the way back returns with dtype and shape, though perhaps not with each bit;
    sorted.
    """
    doubtful, back = _doubtful(composition, tensors), composition.back or {}
    # equal specs are mostly one object
    return [
        key
        for key in doubtful
        if (
            getattr(tensors[key], "torn", None) is None
            and (was := tensors[key].spec) is (now := back[key].spec)
        )
        or was == now
    ]


def not_returned(composition: Composition, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The keys that the way back does not return, or perhaps not with each bit; sorted."""
    back = composition.back or {}
    other = [
        key
        for key, stored in tensors.items()
        if (there := back.get(key)) is None or there.spec != stored.spec
    ]
    return sorted({*other, *_doubtful(composition, tensors)})


def tied_keys(keys: Iterable[str], tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Those of the keys whose tensors share their bytes with another one, in order."""
    storages = Counter(
        chunk.storage
        for stored in tensors.values()
        for chunk in chunks_of(stored)
        if chunk.storage is not None
    )
    return [
        key for key in keys if any(storages[chunk.storage] > 1 for chunk in chunks_of(tensors[key]))
    ]


def _doubtful(composition: Composition, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The keys of what the way back makes out of rounded numbers; and of all that is not the stored
    tensor itself, where rule files of its own lead the way back, or a tensor went because another
    one stood in its place. Sorted.
    """
    known: dict[int, bool] = {}
    # an inverse undoes its op; what other rules make may be anything, and who allows `drop` lets go
    # of a tensor that differs from what stands in its place
    own = any(step.back or bound.redundant for step, bound in composition.steps)
    return sorted(
        key
        for key, there in (composition.back or {}).items()
        if key in tensors
        and (_lossy(there, known) or (own and untouched_key(there, tensors) != key))
    )


def rounded(outputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The keys of outputs that are made of rounded numbers, sorted."""
    known: dict[int, bool] = {}
    return tuple(sorted(key for key, tensor in outputs.items() if _lossy(tensor, known)))


def _lossy(tensor: Tensor, known: dict[int, bool]) -> bool:
    """Whether anything below the tensor rounds; `known`: calls that were looked at, by identity."""
    for source in tensor.sources:
        call = getattr(source, "computation", None)
        if call is None:
            continue
        found = known.get(id(call))
        if found is None:
            found = known[id(call)] = call.lossy or any(_lossy(t, known) for t in call.inputs)
        if found:
            return True
    return False


def list_returns(composition: Composition) -> list[dict[str, Any]]:
    """What encoding again brings back of each number format on the way back, by rule, as its codec
    says it. On a way back itself that is the way that is walked.
    """
    outputs = composition.graph.outputs.values()
    if any(step.backwards for step, _ in composition.steps):
        calls = computations(outputs)
    else:
        there = {id(call) for call in computations(outputs)}
        back = (composition.back or {}).values()
        calls = [call for call in computations(back) if id(call) not in there]
    found: dict[tuple[str, str, str], None] = {}
    # layers share arguments and specs, and the composition holds both
    seen = set[tuple[str, int, int]]()
    for call in calls:
        if call.op_call.op != "quantize" or call.rule == REQUANTIZE:
            continue
        args = call.op_call.args
        alike = (call.rule, id(args), id(call.inputs[0].spec))
        if alike not in seen:
            seen.add(alike)
            found[call.rule.rpartition(" (")[0], args.codec, _returns(call)] = None
    return [{"rule": rule, "codec": codec, "returns": what} for rule, codec, what in found]


def _returns(call: Computation) -> str:
    codec, own = called(call.op_call.args)
    return codec.returns(own, call.inputs[0].spec)
