"""New tensors that are the numbers of encoded old ones, by the codecs' own tables of names.

`m.weight` is the numbers of `m.weight` and `m.weight_scale_inv`, or of `m.weight_packed` and what
belongs to it; so is a tensor of any other name that has these very numbers, where there is only
one. Where both sides are encoded, parts follow their codes. Where the numbers differ, or the new
side alone is encoded, the tensor is named with its format.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import codecs
from ...core.errors import MigrateError, OpError, printable
from ...core.spec import Spec
from ...ops.base import step
from ...planning.requantized import computed
from ...planning.stored import stored_tensor
from ...running.evaluator import Evaluator, reading_step
from ...running.geometry import ByteLayouts
from ...running.number_formats import EncodedTensor, encoded_tensors
from ..relations import Relation

if TYPE_CHECKING:
    from ...planning.graph import Tensor
    from ...source.index import Source


# what numbers are decoded to
_NUMBERS = ("float32", "bfloat16", "float16")


class DecodedWeight(NamedTuple):
    """A relation that decodes, or why there is none for the new tensor `key`."""

    key: str
    relation: Relation | None
    why: str


def decoded(
    old: Source, new: Source, olds: Mapping[str, Spec], news: Mapping[str, Spec]
) -> Iterator[DecodedWeight]:
    """What of the new tensors that are left is encoded in old ones, or is encoded itself."""
    waiting: list[EncodedTensor] = []
    taken: set[str] = set()
    named: set[str] = set()
    for one in encoded_tensors(olds):
        key = next((k for k in (f"{one.module}.weight", one.module) if k in news), None)
        if key is None:
            waiting.append(one)
            continue
        said = f"is encoded as {one.format} in the old checkpoint ({printable(one.key)})"
        ways = _relations(one, key, olds, news[key].dtype)
        wanted = _elements(new, key)
        relation = next((way for way in ways if _made(way, old) == wanted), None)
        if relation is None:
            waiting.append(one)
        else:
            taken.add(key)
        if not ways:
            said += ", and headers do not say how to decode it"
        elif relation is None:
            said += ", and is not the numbers that this stands for"
        named.add(key)
        yield DecodedWeight(key, relation, said)
    left = {k: spec for k, spec in news.items() if k not in taken}
    for found in _elsewhere(waiting, old, new, olds, left):
        if found.relation is not None or found.key not in named:
            yield found
    every = {key: at.spec for key, at in new.index.tensors.items()}
    for one in encoded_tensors(every if left else {}):
        for key in one.parts.values():
            if key in left:
                why = f"belongs to a tensor that is encoded as {one.format}: a rule with `quantize`"
                yield DecodedWeight(key, None, f"{why} makes it, which is not inferred")


def _elsewhere(
    waiting: Sequence[EncodedTensor],
    old: Source,
    new: Source,
    olds: Mapping[str, Spec],
    news: Mapping[str, Spec],
) -> Iterator[DecodedWeight]:
    """The same of modules that are called otherwise: the one new tensor with these numbers."""
    found: dict[str, list[Relation]] = {}
    # of each shape and dtype: what the new tensors hold, once one is looked for
    held: dict[Spec, dict[bytes, list[str]]] = {}
    for one in waiting:
        for dtype in sorted({spec.dtype for spec in news.values() if spec.dtype in _NUMBERS}):
            for way in _relations(one, "", olds, dtype):
                made = _made(way, old)
                if made is None or (spec := Spec(dtype, made[0])) not in news.values():
                    continue
                if spec not in held:
                    held[spec] = defaultdict(list)
                    for key in [k for k, known in news.items() if known == spec]:
                        held[spec][_elements(new, key)[1]].append(key)
                alike = held[spec].get(made[1], [])
                for key in alike:
                    found.setdefault(key, []).append(replace(way, targets=(key,)))
                if alike:
                    break
    shared: Counter[tuple[str, ...]] = Counter(w.sources for ways in found.values() for w in ways)
    for key, ways in found.items():
        sure = len(ways) == 1 and shared[ways[0].sources] == 1
        first = f"{printable(ways[0].sources[0])} is encoded as {_codec(ways[0])}"
        why = f"has the numbers of several: {first}, and nothing says which of them it is"
        yield DecodedWeight(key, ways[0] if sure else None, why)
    formats = ", ".join(sorted({one.format for one in waiting}))
    for key, spec in news.items():
        if waiting and key not in found and spec.dtype in _NUMBERS:
            why = (
                "has no elements in common with an old tensor that is left, and is not the numbers "
                f"of one that is encoded ({formats})"
            )
            yield DecodedWeight(key, None, why)


def parts_that_follow(
    old: Source, new: Source, codes: Mapping[str, str], left: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Old and new keys of the parts that belong to encoded tensors, where their codes went from one
    name to another: `codes` has old key -> new key. Only those whose new key is `left`.
    """
    tensors = old.index.tensors, new.index.tensors
    if not left or not codes:
        return
    before, after = (
        {one.key: one for one in encoded_tensors({k: at.spec for k, at in side.items()})}
        for side in tensors
    )
    for source, target in codes.items():
        one, other = before.get(source), after.get(target)
        if one is None or other is None or one.format != other.format:
            continue
        for role, key in one.parts.items():
            if key != source and other.parts.get(role) in left:
                yield key, other.parts[role]


def _codec(relation: Relation) -> str:
    (said,) = relation.ops[0].values()
    return str(said["codec"])


def _relations(
    one: EncodedTensor, key: str, olds: Mapping[str, Spec], dtype: str
) -> list[Relation]:
    """The ways to decode it: with what shapes say of the codec's arguments, and without."""
    if one.format not in codecs.names() or any(k not in olds for k in one.parts.values()):
        return []
    codec = codecs.get(one.format)
    roles = tuple(role for role in codec.parts if role in one.parts)
    if len(roles) != len(one.parts):
        return []
    told = dict(one.arguments)
    if "rows" in told and "columns" in told:
        told["block"] = [told["rows"], told["columns"]]
    taken = {n: v for n, v in told.items() if n in codec.Args.__dataclass_fields__}
    return [
        Relation(
            tuple(one.parts[role] for role in roles),
            (key,),
            ({"dequantize": {"codec": one.format, "dtype": dtype, **arguments}},),
            roles=roles,
        )
        for arguments in ([taken, {}] if taken else [{}])
    ]


def _elements(source: Source, key: str) -> tuple[tuple[int, ...], bytes]:
    """The shape of a tensor, and a digest of its elements."""
    return _digest(source, stored_tensor(key, source.index.tensors[key]))


def _digest(source: Source, tensor: Tensor) -> tuple[tuple[int, ...], bytes]:
    """The same of a tensor of a graph, as a run makes it: a range of its bytes at a time."""
    layouts, digest, size = ByteLayouts(), hashlib.blake2b(), tensor.spec.nbytes
    values = Evaluator(source, layouts, [tensor])
    most = max(1, min(size, reading_step(tensor, layouts, values)))
    gather = values.gather(memoryview(bytearray(most)))
    for start in range(0, size, most):
        stop = min(start + most, size)
        gather.fill(tensor, start, stop, 0)
        digest.update(gather.buffer[: stop - start])
    return tensor.spec.shape, digest.digest()


def _made(relation: Relation, old: Source) -> tuple[tuple[int, ...], bytes] | None:
    """The same of what a relation decodes; None where it cannot."""
    (said,) = relation.ops[0].values()
    given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in said.items()}
    codec, dtype = given.pop("codec"), given.pop("dtype")
    try:
        call = step(
            "dequantize", codec=codec, dtype=dtype, codec_args=codecs.get(codec).Args(**given)
        )
        parts = [stored_tensor(key, old.index.tensors[key]) for key in relation.sources]
        (tensor,) = computed(call, parts, relation.sources)
        return _digest(old, tensor)
    except (OpError, MigrateError, TypeError, ValueError):
        return None
