"""New tensors that are the numbers of encoded old ones, by the codecs' own tables of names.

Only what keeps its name is looked at: `m.weight` of `m.weight` and `m.weight_scale_inv`, or of
`m.weight_packed` and what belongs to it. Where the numbers differ, or the new side is the encoded
one, the tensor is named with its format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import codecs, ops
from ...core.errors import MigrateError, OpError, printable
from ...running.eager import read_elements
from ...running.number_formats import EncodedTensor, encoded_tensors
from ..relations import Relation

if TYPE_CHECKING:
    from ...core.spec import Spec
    from ...source.index import Source


class DecodedWeight(NamedTuple):
    """A relation that decodes, or why there is none for the new tensor `key`."""

    key: str
    relation: Relation | None
    why: str


def decoded(
    old: Source, new: Source, olds: Mapping[str, Spec], news: Mapping[str, Spec]
) -> Iterator[DecodedWeight]:
    """What of the new tensors that are left is encoded in old ones, or is encoded itself."""
    for one in encoded_tensors(olds):
        key = next((k for k in (f"{one.module}.weight", one.module) if k in news), None)
        if key is None:
            continue
        said = f"is encoded as {one.format} in the old checkpoint ({printable(one.key)})"
        ways = _relations(one, key, olds, news[key])
        relation = next((way for way in ways if _equal(way, old, new, key)), None)
        if not ways:
            said += ", and headers do not say how to decode it"
        elif relation is None:
            said += ", and is not the numbers that this stands for"
        yield DecodedWeight(key, relation, said)
    for one in encoded_tensors(news):
        for key in one.parts.values():
            if key in news:
                why = f"belongs to a tensor that is encoded as {one.format}: a rule with `quantize`"
                yield DecodedWeight(key, None, f"{why} makes it, which is not inferred")


def _relations(
    one: EncodedTensor, key: str, olds: Mapping[str, Spec], spec: Spec
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
            ({"dequantize": {"codec": one.format, "dtype": spec.dtype, **arguments}},),
            roles=roles,
        )
        for arguments in ([taken, {}] if taken else [{}])
    ]


def _equal(relation: Relation, old: Source, new: Source, key: str) -> bool:
    (said,) = relation.ops[0].values()
    given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in said.items()}
    codec, dtype = given.pop("codec"), given.pop("dtype")
    try:
        args: Any = ops.get("dequantize").Args(codec, dtype, codecs.get(codec).Args(**given))
        arrays = [read_elements(old, k) for k in relation.sources]
        dtypes = [old.index.tensors[k].spec.dtype for k in relation.sources]
        (made,) = ops.get("dequantize").eager(args, arrays, 1, dtypes)
    except (OpError, MigrateError, TypeError, ValueError):
        return False
    wanted = read_elements(new, key)
    return made.shape == wanted.shape and made.tobytes() == wanted.tobytes()
