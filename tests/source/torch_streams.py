"""Pickle streams that real torch wrote, and what is read from them."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from migrate.source.pickle import machine, nodes, policy
from migrate.source.pickle.nodes import Call, Global, Persistent


def saved(value: Any, protocol: int = 2) -> tuple[bytes, dict[str, int]]:
    """data.pkl of torch.save(value), and the bytes of its storages by key."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    with zipfile.ZipFile(buffer) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        records = {
            n.removeprefix("data/"): archive.getinfo(names[n]).file_size
            for n in names
            if n.startswith("data/")
        }
        return archive.read(names["data.pkl"]), records


def decoded(value: Any, protocol: int = 2) -> policy.Decoded:
    """What is read from torch.save(value)."""
    data, records = saved(value, protocol)
    return policy.decode(
        machine.read_pickle(data, nodes.ARCHIVE, name="x.pt", persistent=True), "x.pt", records
    )


def tree(value: Any, protocol: int = 2) -> Any:
    """The tree of torch.save(value), which holds nothing outside the allow-list."""
    found = decoded(value, protocol)
    assert [(o.name, o.reason, o.paths) for o in found.outside] == []
    return found.tree


def storage(
    key: str = "0",
    numel: int = 6,
    cls: str = "FloatStorage",
    location: str = "cpu",
    module: str = "torch",
) -> Persistent:
    return Persistent(("storage", Global(module, cls), key, location, numel))


def reduce(module: str, name: str, *arguments: Any) -> Call:
    return Call("reduce", Global(module, name), arguments)


def dense(store: Any = None, offset: Any = 0, shape: Any = (2, 3), strides: Any = (3, 1)) -> Call:
    """The call that rebuilds a tensor, as torch writes it unless told otherwise."""
    store = storage() if store is None else store
    return reduce(
        "torch._utils",
        "_rebuild_tensor_v2",
        store,
        offset,
        shape,
        strides,
        False,
        reduce("collections", "OrderedDict"),
    )
