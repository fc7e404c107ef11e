"""Says whether two checkpoints hold the same tensors bit for bit, however they are cut into files.

It shares no code with migrate and needs only the standard library (for files of torch.save torch),
so that a demo or benchmark does not let the tool
judge itself. Keys, dtypes, shapes and element bytes are compared; file names, order and metadata
are not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

CHUNK = 4 << 20


class Place(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def tensors(path: Path) -> dict[str, Place]:
    """Key -> where it lies, over all safetensors files of a folder or of the one file."""
    found: dict[str, Place] = _torch_tensors(sorted(path.glob("*.bin"))) if path.is_dir() else {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(size))
        entries.pop("__metadata__", None)
        for key, entry in entries.items():
            begin, end = entry["data_offsets"]
            if key in found:
                raise SystemExit(f"{key} stands in {found[key].file.name} and in {file.name}")
            found[key] = Place(
                entry["dtype"], tuple(entry["shape"]), file, 8 + size + begin, end - begin
            )
    return found


def _torch_tensors(files: list[Path]) -> dict[str, Place]:
    """The same for files of torch.save, by torch itself; their tensors are contiguous."""
    found: dict[str, Place] = {}
    for file in files:
        import torch

        for key, tensor in torch.load(file, weights_only=True, map_location="meta").items():
            offset = (
                tensor.untyped_storage()._checkpoint_offset
                + tensor.storage_offset() * tensor.itemsize
            )
            found[key] = Place(str(tensor.dtype), tuple(tensor.shape), file, offset, tensor.nbytes)
    return found


def differences(a: Path, b: Path) -> list[str]:
    """One line per key that is missing or differs; empty when all is equal."""
    left, right = tensors(a), tensors(b)
    out = [f"{key}: only in {a}" for key in left.keys() - right.keys()]
    out += [f"{key}: only in {b}" for key in right.keys() - left.keys()]
    opened: dict[Path, int] = {}
    try:
        for key in left.keys() & right.keys():
            x, y = left[key], right[key]
            if x[:2] != y[:2]:
                out.append(f"{key}: {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}")
                continue
            fd = [
                opened[p.file]
                if p.file in opened
                else opened.setdefault(p.file, os.open(p.file, os.O_RDONLY))
                for p in (x, y)
            ]
            for done in range(0, x.nbytes, CHUNK):
                n = min(CHUNK, x.nbytes - done)
                one, two = os.pread(fd[0], n, x.offset + done), os.pread(fd[1], n, y.offset + done)
                if len(one) != n or one != two:
                    out.append(f"{key}: bytes differ between {done} and {done + n}")
                    break
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return sorted(out)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: compare.py CHECKPOINT CHECKPOINT")
    a, b = Path(sys.argv[1]), Path(sys.argv[2])
    found = differences(a, b)
    if found:
        print("\n".join(found[:20]))
        sys.exit(f"{a} and {b} differ in {len(found)} tensors")
    kept = tensors(a)
    if not kept:
        sys.exit(f"{a} holds no tensors")
    print(
        f"{a} and {b} are equal bit for bit: {len(kept)} tensors, "
        f"{sum(p.nbytes for p in kept.values()):,} bytes"
    )


if __name__ == "__main__":
    main()
