"""Prints, as JSON, how long the pickle machine takes on a DCP `.metadata`, and the pure-Python
unpickler on the same bytes.

pickle_speed.py [MEGABYTES]

The file is one that torch.distributed.checkpoint would write: one tensor a chunk, names and files
as a large model has them. Both readers run in turn in this process, imports apart; each time is the
best of five and holds the release of what was read.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

from migrate.source.pickle.machine import read_pickle
from migrate.source.pickle.nodes import METADATA

BYTES_A_CHUNK = 238


def metadata(chunks: int) -> bytes:
    """The `.metadata` of `chunks` tensors of one chunk each."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    start, shape = torch.Size([0, 0]), [1024, 512]
    for i in range(chunks):
        key = f"model.layers.{i // 20}.block.{i % 20}.weight"
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size(shape))
        tensors[key] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size(shape), [chunk]
        )
        places[MetadataIndex(key, start, 0)] = _StorageInfo(
            f"__{i % 8}_0.distcp", i * 2_097_152, 2_097_152
        )
    return pickle.dumps(Metadata(tensors, {key: (key,) for key in tensors}, places), 4)


def best(readers: list[Callable[[], Any]], rounds: int = 5) -> list[float]:
    """The shortest time of each reader, in seconds; they take turns."""
    times = [float("inf")] * len(readers)
    for _ in range(rounds):
        for i, reader in enumerate(readers):
            began = time.perf_counter()
            reader()
            times[i] = min(times[i], time.perf_counter() - began)
    return times


def main() -> None:
    wanted = float(sys.argv[1]) * 1e6 if len(sys.argv) > 1 else 8e6
    data = metadata(round(wanted / BYTES_A_CHUNK))
    ours, pure = best(
        [
            lambda: read_pickle(data, METADATA, name=".metadata"),
            lambda: pickle._Unpickler(io.BytesIO(data)).load(),
        ]
    )
    print(
        json.dumps(
            {
                "bytes": len(data),
                "machine": ours,
                "pure_python_unpickler": pure,
                "ratio": ours / pure,
            }
        )
    )


if __name__ == "__main__":
    main()
