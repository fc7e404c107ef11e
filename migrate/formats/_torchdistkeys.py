"""The keys of a model of Megatron, and of the entries of a distributed checkpoint that hold it.

An entry holds all layers of one kind, with the layers along its first axis and experts along the
next, unless layers or experts are numbered. Linear layers and norms are called as the modules of
Transformer Engine are, whatever modules the model is made of; its arguments tell how it calls them
itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..source.pickle.tree import DictNode, ListNode, TensorRecord
from ..source.tree import STATE, kept_by_part
from ._megatron import SIZES

LAYERS, EXPERTS, LOCAL = "layers", "experts", "local_experts"
# stacks whose layers may be along an axis
STACKS = ("decoder.layers", "encoder.layers")
# of a gated projection, in the order of their rows
HALVES, GATED = ("_w", "_v"), ("linear_fc1.weight", "linear_fc1.bias")
# norms of Megatron's own modules, and what they are called in entries
_NORMS = {
    "input_layernorm": ("self_attention", "linear_qkv", "layer_norm_"),
    "pre_mlp_layernorm": ("mlp", "linear_fc1", "layer_norm_"),
}
_SHARD = re.compile(r"(.+)/shard_([0-9]{1,9}(?:\.[0-9]{1,9})*)_([0-9]{1,9}(?:\.[0-9]{1,9})*)")
_MEMBER = re.compile(r"(weight|bias)([0-9]{1,9})", re.ASCII)
# the state of an expert among those of one group of linear layers, and before it their module
OF_EXPERT = re.compile(rf"((?:.+\.)?experts\.linear_fc[12])\.([0-9]{{1,9}})\.{STATE}", re.ASCII)
# what Megatron says of how a checkpoint is made, and in it that layers are numbered
CONTENT, _NUMBERED = "content_metadata", "non_homogeneous_layers"
# the same where it has nothing special to say
USUAL_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
# where `common.pt` holds what a state dict has beside its tensors, which Megatron does not save
VERSIONS = "migrate.versions"
_OF_MODULES = frozenset({"_metadata", "_metadata_kept"})
# the place of a number in a key
_GAP = "\0"


class Spelling(NamedTuple):
    """How a model calls what entries call as Transformer Engine does: its norms, and its experts
    where they are modules of their own.
    """

    norms: bool = False
    experts: bool = False

    @classmethod
    def of(cls, args: Any) -> Spelling:
        """What the arguments of the training script say, and else the names of entries."""
        if type(args) is not DictNode:
            return cls()
        return cls(args.get("transformer_impl") == "local", args.get("moe_grouped_gemm") is False)


class ModelKey(NamedTuple):
    """What an entry is of a model: `pieces` are the key with a gap for each leading axis.

    `layers` is the path of the layers that it belongs to and the number of its own, None where all
    of them are along an axis; `experts` the same of experts.
    """

    pieces: tuple[str, ...]
    layers: tuple[str, int | None] | None = None
    experts: tuple[str, int | None] | None = None

    @property
    def axes(self) -> int:
        return len(self.pieces) - 1

    def key(self, numbers: Sequence[int]) -> str:
        """The key of one layer and expert, by their places along the axes."""
        said = [piece + str(number) for piece, number in zip(self.pieces, numbers, strict=False)]
        return "".join((*said, self.pieces[-1]))


def read_name(key: str, spelling: Spelling) -> ModelKey:
    """The name that an entry's key spells, without the ending of a half or a shard."""
    parts = key.split(".")
    if _GAP in key:
        return ModelKey((key,))
    layers: tuple[str, int | None] | None = None
    experts: tuple[str, int | None] | None = None
    if (at := _behind(parts, LAYERS)) is not None:
        layers = ".".join(parts[:at]), _number(parts[at])
        if layers[1] is None:
            parts.insert(at, _GAP)
        if spelling.norms:
            _call_norm(parts)
    if (at := _behind(parts, EXPERTS, EXPERTS)) is not None:
        number = _number(parts[at])
        experts = ".".join(part for part in parts[: at - 1] if part != _GAP), number
        said = _GAP if number is None else str(number)
        rest = parts[at + (number is not None) :]
        if spelling.experts:
            parts[at - 1 :] = [LOCAL, said, *rest]
        elif rest[-1:] == [STATE]:
            parts[at - 1 :] = [*rest[:-1], said, STATE]
        else:
            # what has an expert's number is called after it
            parts[at - 1 :] = [*rest[:-1], rest[-1] + said] if rest else [said]
    return ModelKey(tuple(".".join(parts).split(_GAP)), layers, experts)


def fused_norm(key: str) -> str | None:
    """The linear layer of which Transformer Engine makes a norm of this key a part, if a model of
    it has one there; None for other keys.
    """
    parts = key.split(".")
    if parts[-2:-1] and parts[-2] in _NORMS:
        return ".".join((*parts[:-2], *_NORMS[parts[-2]][:-1], "weight"))
    return None


def _call_norm(parts: list[str]) -> None:
    for own, (*module, begin) in _NORMS.items():
        if parts[-3:-1] == module and parts[-1].startswith(begin):
            parts[-3:] = [own, parts[-1][len(begin) :]]
            return


def _behind(parts: Sequence[str], *words: str) -> int | None:
    """Where the parts go on behind the first of these words in a row; None where they do not."""
    size = len(words)
    for at in range(size, len(parts)):
        if tuple(parts[at - size : at]) == words:
            return at
    return None


def _number(part: str) -> int | None:
    return int(part) if part.isascii() and part.isdecimal() and len(part) < 10 else None


class EntryKey(NamedTuple):
    """What holds a tensor of a model: the entry's key, and the places along its leading axes. The
    layer and the expert that it is of, None where it is of none; `stack` is the path of the layers.
    """

    key: str
    numbers: tuple[int, ...]
    stack: str = ""
    layer: int | None = None
    expert: int | None = None


def entry_of(key: str, spelling: Spelling, *, numbered: bool, apart: bool) -> EntryKey:
    """The entry for a key of a model; `numbered`: each layer has entries of its own, `apart`: each
    expert too.
    """
    parts = key.split(".")
    numbers: list[int] = []
    stack, layer = "", None
    if (at := _behind(parts, LAYERS)) is not None and (layer := _number(parts[at])) is not None:
        stack = ".".join(parts[:at])
        if spelling.norms and len(parts) > at + 2 and parts[-2] in _NORMS:
            *module, begin = _NORMS[parts[-2]]
            parts[-2:] = [*module, begin + parts[-1]]
        if stack in STACKS and not numbered:
            numbers.append(layer)
            del parts[at]
    expert = _take_expert(parts, apart)
    if expert is not None and not apart:
        numbers.append(expert)
    return EntryKey(".".join(parts), tuple(numbers), stack, layer, expert)


def _take_expert(parts: list[str], apart: bool) -> int | None:
    """Calls what an expert has as entries do, `apart` or without its number; the number, None if it
    is no expert's.
    """
    at = _behind(parts, EXPERTS)
    if at is None:
        return None
    rest = parts[at:]
    if rest[0] == LOCAL and len(rest) > 2:
        number = _number(rest[1])
        rest = rest[2:]
    elif rest[-1] == STATE and len(rest) > 2:
        number = _number(rest[-2])
        rest = [*rest[:-2], STATE]
    else:
        # `weight1` beside no module is that of all experts
        found = _MEMBER.fullmatch(rest[-1]) if len(rest) > 1 else None
        number = None if found is None else int(found[2])
        rest = [*rest[:-1], found[1] if found else rest[-1]]
    if number is not None:
        parts[at:] = [EXPERTS, *([str(number)] if apart else []), *rest]
    return number


def says_nothing(state: Any) -> bool:
    """Whether an extra state is None or, as Transformer Engine writes it without FP8, empty: that
    of a group of experts is the state of each of them then.
    """
    return state is None or (type(state) is TensorRecord and state.shape == (0,))


class ShardKey(NamedTuple):
    """Which of how many an entry without a tensor is, along each axis."""

    key: str
    numbers: tuple[int, ...]
    counts: tuple[int, ...]

    def __str__(self) -> str:
        numbers, counts = (".".join(map(str, few)) for few in self[1:])
        return f"{self.key}/shard_{numbers}_{counts}"


def read_shard(key: str) -> ShardKey | None:
    """The shard that a key names; None for any other key."""
    found = _SHARD.fullmatch(key) if "/shard_" in key else None
    if found is None:
        return None
    numbers, counts = (tuple(map(int, found[group].split("."))) for group in (2, 3))
    if len(numbers) != len(counts) or any(n >= c for n, c in zip(numbers, counts, strict=True)):
        return None
    return ShardKey(found[1], numbers, counts)


def ranks_of_parts(root: DictNode) -> dict[str, tuple[int, int]] | None:
    """The stage and the rank of each part of which the root keeps something, by its name: of the
    first expert group, whose generators Megatron keeps. None unless all of a grid are there.
    """
    args, kept = root.get("args"), dict(kept_by_part(root))
    if type(args) is not DictNode:
        return None
    sizes = [args.get(SIZES[axis], 1) for axis in ("TP", "PP", "EP")]
    if any(type(size) is not int for size in sizes) or not 1 < sizes[0] * sizes[1] <= len(kept):
        return None
    ranks, stages, groups = sizes
    found = {
        part_name(rank, stage if stages > 1 else None, 0 if groups > 1 else None): (stage, rank)
        for stage in range(stages)
        for rank in range(ranks)
    }
    return found if found.keys() <= kept.keys() else None


def part_name(rank: int, stage: int | None, group: int | None = None) -> str:
    """What the folder of a part is called in Megatron's other format."""
    return f"mp_rank_{rank:02}" + "".join(f"_{n:03}" for n in (stage, group) if n is not None)


def layers_differ(args: Any, content: Any) -> bool:
    """Whether Megatron numbers the layers of such a model instead of putting them along an axis."""
    if type(content) is DictNode and (content.get(_NUMBERED) or singles(content)):
        return True
    if type(args) is not DictNode:
        return False
    for field in ("moe_layer_freq", "linear_attention_freq"):
        every = args.get(field)
        if type(every) is ListNode or (type(every) is int and every > 1):
            return True
    return bool(
        args.get("hetereogenous_dist_checkpoint") or args.get("heterogeneous_layers_config_path")
    )


def with_numbers(common: Mapping[str, Any]) -> dict[str, Any]:
    """The values beside a model whose layers are numbered, so that they say it: Megatron's own word
    for it, which it reads again with the checkpoint.
    """
    content = common.get(CONTENT)
    if layers_differ(common.get("args"), content) or type(content) not in (DictNode, type(None)):
        return dict(common)
    pairs = () if content is None else content.pairs
    return {**common, CONTENT: DictNode("dict", (*pairs, (_NUMBERED, True)), None)}


def are_versions(attributes: Any) -> bool:
    """Whether the attributes of a state dict are the versions of its modules and nothing else."""
    return (
        type(attributes) is DictNode
        and bool(attributes.pairs)
        and all(
            type(key) is str and key in _OF_MODULES and type(value) is DictNode
            for key, value in attributes.pairs
        )
    )


def without_usual(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values beside a model, as JSON, without what every distributed checkpoint has of them."""
    said = values.get(CONTENT)
    usual = isinstance(said, dict) and {**said, _NUMBERED: 0} == {**USUAL_CONTENT, _NUMBERED: 0}
    return {key: value for key, value in values.items() if not (usual and key == CONTENT)}


def singles(content: Any) -> bool:
    """Whether halves of gated projections, and experts, are entries of their own."""
    return type(content) is DictNode and content.get("singleton_local_shards") is True
