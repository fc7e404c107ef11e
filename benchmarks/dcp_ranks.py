"""`dcp.load` on 4 gloo ranks through the reader that migrates, and what it is compared with, in
turn within one round. Prints a line of JSON: seconds of each way by round, the most private memory
above the model and the imports, in bytes, and the seconds of the load that took it, which is the
first of these processes.

dcp_ranks.py stack ROUNDS FOLDER KEY WAYS        the experts of the stack KEY: "reader", "preadv"
                                                 (the same bytes to the same places) and "stock"
                                                 (torch's reader behind one that renames)
dcp_ranks.py model ROUNDS OLD NEW LAYOUT         OLD by the reader, against NEW, which is OLD in the
                                                 LAYOUT as DCP, by stock torch; FSDP2
dcp_ranks.py blocks ROUNDS OLD LAYOUT OUT ARGV…  OLD by the reader, against the command ARGV, which
                                                 writes it to OUT

What a way has filled is compared bit for bit with what another has, before its time counts.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import process
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, zeros

import migrate
from migrate import formats
from migrate.source.blobs import chunks_of

RANKS = 4
Ways = Mapping[str, Callable[[], Any]]
State = dict[str, torch.Tensor]


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _clear(state: State) -> None:
    for value in state.values():
        _local(value).detach().view(torch.uint8).fill_(0)


def _bits(state: State) -> dict[str, torch.Tensor]:
    return {key: _local(value).detach().view(torch.uint8).clone() for key, value in state.items()}


class Peak:
    """The most private memory of this process (RssAnon) beyond what it had."""

    def __enter__(self) -> Peak:
        # what an allocator keeps of earlier work would hide as much of this
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        self._before = self._most = process.private(os.getpid())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, process.private(os.getpid()))

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        self._thread.join()

    @property
    def beyond(self) -> int:
        return self._most - self._before


def _timed(call: Callable[[], Any]) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started


def _compare(rank: int, rounds: int, state: State, ways: Ways, filling: Ways | None = None) -> None:
    """The memory of a load, and each way once a round, the order turned every round; on rank 0
    prints what came of it. `filling`: calls that have to fill the same, if not the ways.
    """
    one = torch.ones(1)
    dcp.load({"one": one}, storage_reader=migrate.dcp.MigratingReader({"one": one}))
    _clear(state)
    # the first load of this process: nothing is at hand that an earlier one has left
    with Peak() as peak:
        first_load = _timed(ways["reader"])
    filled = []
    for call in (filling or ways).values():
        _clear(state)
        call()
        filled.append(_bits(state))
    first, *others = filled
    if not all(torch.equal(first[key], other[key]) for other in others for key in first):
        sys.exit("the ways differ in what they fill")
    if not any(value.any() for value in first.values()):
        sys.exit("nothing was filled")
    del filled, first, others
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(_timed(ways[name]))
    held: list[Any] = [None] * RANKS
    dist.all_gather_object(held, peak.beyond)
    if not rank:
        found = {"seconds": seconds, "private": max(held), "first": first_load}
        print(json.dumps(found), flush=True)


class Renaming(dcp.FileSystemReader):  # type: ignore[misc]
    """Torch's reader behind names of its own: the experts of a stack, each a part of its chunk."""

    def __init__(self, folder: str, key: str) -> None:
        super().__init__(folder)
        self._key = key

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = super().read_metadata(*args, **kwargs)
        whole = found.state_dict_metadata[self._key]
        size = whole.size[1:]
        one = TensorStorageMetadata(
            whole.properties, size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
        )
        names = {f"experts.{n}": one for n in range(whole.size[0])}
        return replace(found, state_dict_metadata=names, planner_data={n: (n,) for n in names})

    def read_data(self, plan: Any, planner: Any) -> Any:
        items = []
        for item in plan.items:
            number = int(item.storage_index.fqn.split(".")[1])
            items.append(
                replace(
                    item,
                    storage_index=MetadataIndex(self._key, [0] * (1 + len(item.lengths)), 0),
                    storage_offsets=torch.Size((number, *item.storage_offsets)),
                    lengths=torch.Size((1, *item.lengths)),
                )
            )
        return super().read_data(replace(plan, items=items), _Squeezing(planner))


class _Squeezing:
    """A planner whose targets have an axis of one element in front."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        lengths = torch.Size(item.lengths[1:])
        found: torch.Tensor = self._planner.resolve_tensor(replace(item, lengths=lengths))
        return found.unsqueeze(0)

    def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
        pass


def _stack(rank: int, rounds: int, folder: str, key: str, asked: str) -> None:
    source = formats.open(folder)
    stored = source.index.tensors[key]
    (chunk,) = chunks_of(stored)
    path = Path(folder) / source.blobs[chunk.blob].name
    mesh = init_device_mesh("cpu", (RANKS,))
    count, *shape = stored.spec.shape
    state: State = {
        f"experts.{n}": zeros(*shape, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0)])
        for n in range(count)
    }
    rules = Path(folder).with_suffix(".yaml")
    part = shape[0] * shape[1] * 2 // RANKS
    targets = [
        memoryview(_local(one).view(torch.uint8).numpy()).cast("B") for one in state.values()
    ]

    def preadv() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for number, target in enumerate(targets):
                at, done = chunk.offset + (number * RANKS + rank) * part, 0
                while done < part:
                    done += os.preadv(descriptor, [target[done:]], at + done)
        finally:
            os.close(descriptor)

    def reader() -> None:
        dcp.load(state, storage_reader=migrate.dcp.MigratingReader(folder, rules=rules))

    def stock() -> None:
        dcp.load(state, storage_reader=Renaming(folder, key))

    ways = {"reader": reader, "preadv": preadv, "stock": stock}
    _compare(rank, rounds, state, {name: ways[name] for name in asked.split(",")})


def _fsdp2(source: str, layout: str) -> State:
    """The state dict of a model with the parameters that OLD has in the layout, FSDP2 on all
    ranks.
    """
    plan = migrate.dcp.MigratingReader(source, to=layout, allow={"lossy"}).read_metadata()
    root = torch.nn.Module()
    for key, entry in plan.state_dict_metadata.items():
        *path, last = key.split(".")
        owner = root
        for name in path:
            if name not in owner._modules:
                owner.add_module(name, torch.nn.Module())
            owner = owner.get_submodule(name)
        made = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        owner.register_parameter(last, torch.nn.Parameter(made, requires_grad=False))
    fully_shard(root, mesh=init_device_mesh("cpu", (RANKS,)))
    root.to_empty(device="cpu")
    state: State = get_model_state_dict(root)
    return state


def _model(rank: int, rounds: int, old: str, new: str, layout: str) -> None:
    state = _fsdp2(old, layout)

    def reader() -> None:
        dcp.load(state, storage_reader=migrate.dcp.MigratingReader(old, to=layout))

    def stock() -> None:
        dcp.load(state, checkpoint_id=new)

    _compare(rank, rounds, state, {"reader": reader, "stock": stock})


def _blocks(rank: int, rounds: int, old: str, layout: str, out: str, *argv: str) -> None:
    state = _fsdp2(old, layout)

    def reader() -> None:
        made = migrate.dcp.MigratingReader(old, to=layout, allow={"lossy"})
        dcp.load(state, storage_reader=made)

    def apply() -> None:
        if not rank:
            shutil.rmtree(out, ignore_errors=True)
            # by itself: it looks for other ranks where these are named
            alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=alone)
        dist.barrier()

    def checked() -> None:
        apply()
        dcp.load(state, storage_reader=migrate.dcp.MigratingReader(out))

    ways = {"reader": reader, "apply": apply}
    _compare(rank, rounds, state, ways, {"reader": reader, "apply": checked})


CASES = {"stack": _stack, "model": _model, "blocks": _blocks}


def _begin(rank: int, store: str, what: str, rounds: int, rest: tuple[str, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    CASES[what](rank, rounds, *rest)
    dist.destroy_process_group()


def main() -> None:
    what, rounds, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_begin, (f"{folder}/store", what, int(rounds), tuple(rest)), RANKS)


if __name__ == "__main__":
    main()
