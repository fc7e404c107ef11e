"""`verify` of tensors that are much larger than the memory that it may take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

import migrate

# bytes
MOST = 16 << 20


def peak_of_no_differences(differences: Callable[[], list[Any]]) -> int:
    """Asserts that there are none; the most bytes that Python held meanwhile."""
    tracemalloc.start()
    try:
        assert differences() == []
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def verify_sees_bytes(
    parts: dict[str, Any], rules: str, folder: Path, flipped: Sequence[int]
) -> None:
    """Asserts that `verify` finds what rules make of `parts` equal, and with another byte at one of
    these places of the data (from its end if negative) one tensor that differs.
    """
    source, out, file = (folder / name for name in ("in.safetensors", "out.safetensors", "r.yaml"))
    save_file(parts, source)
    file.write_text(rules)
    migrate.apply(source, out, rules=file, fsync=False)
    asked: dict[str, Any] = {"source": source, "rules": file, "max_memory": MOST}
    assert migrate.verify(out, **asked).equal
    raw = bytearray(out.read_bytes())
    data = 8 + int.from_bytes(raw[:8], "little")
    for at in flipped:
        place = data + at if at >= 0 else len(raw) + at
        raw[place] ^= 1
        out.write_bytes(raw)
        assert len(migrate.verify(out, **asked).differences) == 1
        raw[place] ^= 1
