"""What was cut off tensors and is kept for the way back, in the tree of a checkpoint: a dict of its
own, beside the dict that rules work on, by what cut it.

    {"model": {...}, "migrate.kept": {"megatron-gpt/llama/gpt embedding": tensor([[...], [...]])}}
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..source.pickle.tree import DictNode, TensorRecord
from ..source.target import output_record, outside_prefix
from ..source.tree import KEPT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..planning.graph import Tensor
    from ..planning.kept import KeptPart
    from ..source.blobs import StoredTensor
    from ..source.index import Index
    from ..source.target import TargetTree
    from ..source.tree import FileTree


def kept_parts(index: Index) -> dict[str, tuple[str, StoredTensor]]:
    """Name -> key and place of what is kept in a checkpoint."""
    tree = index.tree
    if tree is None:
        return {}
    keys = {name: tree.names[id(value)] for name, value in _held(tree.parts[0])}
    return {name: (key, tree.passed_through[key]) for name, key in keys.items()}


def _held(part: FileTree) -> Iterator[tuple[str, TensorRecord]]:
    held = part.root.get(KEPT) if type(part.root) is DictNode else None
    for name, value in held.pairs if type(held) is DictNode else ():
        if type(name) is str and type(value) is TensorRecord:
            yield name, value


def put_kept(
    tree: TargetTree, outputs: Mapping[str, Tensor], parts: Mapping[str, KeptPart]
) -> tuple[TargetTree, dict[str, Tensor], dict[str, str]]:
    """The tree with these parts in it, all tensors of the output, and the key of each part."""
    before = {tree.names[id(value)] for part in tree.parts for _, value in _held(part)}
    specs = {key: spec for key, spec in tree.passed_through.items() if key not in before}
    every = {key: tensor for key, tensor in outputs.items() if key not in before}
    names = {number: key for number, key in tree.names.items() if key not in before}
    first = {key: one for key, one in tree.first.items() if key not in before}
    prefix, keys, pairs = outside_prefix({**every, **specs}), dict[str, str](), []
    mark = "@0" if len(tree.parts) > 1 else ""
    for name, part in parts.items():
        key, spec = f"{prefix}{KEPT}.{name}{mark}", part.tensor.spec
        record = output_record(spec)
        pairs.append((name, record))
        keys[name] = names[id(record)] = first[key] = key
        specs[key], every[key] = spec, part.tensor
    # of several ranks the first has it
    own = [((KEPT, DictNode("dict", tuple(pairs), None)),) if pairs else ()]
    own += [()] * (len(tree.parts) - 1)
    made = replace(
        tree,
        parts=tuple(map(_with, tree.parts, own)),
        names=names,
        passed_through=specs,
        first=first,
    )
    return made, every, keys


def _with(part: FileTree, own: tuple[Any, ...]) -> FileTree:
    """The part with its own entry of what is kept, or none, in the place of what it has."""
    if not own and part.root.get(KEPT) is None:
        return part
    pairs = (*(pair for pair in part.root.pairs if pair[0] != KEPT), *own)
    return part._replace(root=DictNode(part.root.kind, pairs, None, part.root.attributes))
