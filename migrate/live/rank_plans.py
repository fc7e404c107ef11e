"""What ranks say to the coordinator of a load, and what it says to them.

torch gathers the plans of all ranks on the coordinator and sends each of them back, though its
planners look at no item of them there. So items travel as text, of which only that is made objects
that somebody looks at.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ..core.errors import fail


class RankPlan(NamedTuple):
    """What a rank says of its plan to the coordinator. `asked` are the keys that it asks for, as
    bits in the order of all keys of the migrated checkpoint, sorted.
    """

    digest: str
    asked: int


class AgreedPlan(NamedTuple):
    """What the coordinator says to all ranks: the keys of the checkpoint that none of them asks
    for.
    """

    unexpected: tuple[str, ...]


class PackedPlan(LoadPlan):  # type: ignore[misc]
    """A plan whose items are text on the way to another rank, until they are looked at there."""

    def __getattr__(self, name: str) -> Any:
        packed = self.__dict__.pop("_packed", None) if name == "items" else None
        if packed is None:
            raise AttributeError(name)
        self.items = _unpack(packed)
        return self.items

    def __reduce__(self) -> tuple[Any, ...]:
        held = self.__dict__
        packed = held.get("_packed") or _pack(self.items)
        rest = held["storage_data"], held["planner_data"]
        return (LoadPlan, (self.items, *rest)) if packed is None else (_arrived, (packed, *rest))


def packed_plan(plan: LoadPlan, said: RankPlan) -> LoadPlan:
    """A rank's plan with what it says to the coordinator."""
    if type(plan) is LoadPlan:
        return PackedPlan(plan.items, said, plan.planner_data)
    return _told(plan, said)


def agree(plans: Sequence[LoadPlan], digest: str, keys: Iterable[str]) -> list[str]:
    """The keys that no rank asks for, in their order; M974 unless all plans have this digest."""
    asked = 0
    for rank, plan in enumerate(plans):
        said = plan.storage_data
        if not isinstance(said, RankPlan) or said.digest != digest:
            _refuse_difference(rank, said)
        asked |= said.asked
    names = list(keys)
    found = asked.to_bytes(len(names), "big")
    gone = {key for key, is_asked in zip(sorted(names), found, strict=True) if not is_asked}
    return [key for key in names if key in gone]


def bits_of(asked: Collection[str], keys: Iterable[str]) -> int:
    """The keys that are asked for, as `RankPlan` has them."""
    return int.from_bytes(bytes([key in asked for key in sorted(keys)]), "big")


def agreed_plans(plans: Iterable[LoadPlan], unexpected: Sequence[str]) -> list[LoadPlan]:
    """The plans with what the coordinator says to all ranks."""
    said = AgreedPlan(tuple(unexpected))
    return [_told(plan, said) for plan in plans]


def _told(plan: LoadPlan, said: RankPlan | AgreedPlan) -> LoadPlan:
    if isinstance(plan, PackedPlan):
        # without a look at its items
        plan.storage_data = said
        return plan
    return replace(plan, storage_data=said)


def _pack(items: Sequence[ReadItem]) -> str | None:
    """Items as text; None where they, or what they hold, are of a class of their own."""
    rows = []
    for item in items:
        there, here = item.storage_index, item.dest_index
        if type(item) is not ReadItem or not type(there) is type(here) is MetadataIndex:
            return None
        rows.append(
            (
                item.type.value,
                (here.fqn, here.offset, here.index),
                item.dest_offsets,
                (there.fqn, there.offset, there.index),
                item.storage_offsets,
                item.lengths,
            )
        )
    try:
        return json.dumps(rows)
    except TypeError:
        return None


def _unpack(packed: str) -> list[ReadItem]:
    return [
        ReadItem(
            LoadItemType(kind),
            MetadataIndex(*here),
            torch.Size(into),
            MetadataIndex(*there),
            torch.Size(first),
            torch.Size(lengths),
        )
        for kind, here, into, there, first, lengths in json.loads(packed)
    ]


def _arrived(packed: str, storage_data: Any, planner_data: Any) -> PackedPlan:
    plan = PackedPlan([], storage_data, planner_data)
    del plan.items
    plan.__dict__["_packed"] = packed
    return plan


def _refuse_difference(rank: int, said: Any) -> NoReturn:
    """M974 for a rank that has another plan than the coordinator, or did not say which."""
    if isinstance(said, RankPlan):
        fail(
            "M974",
            f"rank {rank} migrates in another way than the coordinator: the digests of their plans "
            "differ",
            help="give every rank the same arguments, and the same files to read",
        )
    fail(
        "M974",
        f"the planner of rank {rank} dropped what the reader put into its plan",
        help="`create_global_plan` has to keep `storage_data`",
    )
