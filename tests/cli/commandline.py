"""Checkpoints made with the standard library alone, and the command line run on them, in this
process or in one of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from work import HANG

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "hf"
SIZES = {
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
}

# name -> (dtype, shape) or (dtype, shape, bytes); without bytes the contents are made from the name
Tensors = Mapping[str, "tuple[str, Sequence[int]] | tuple[str, Sequence[int], bytes]"]


# what nothing of ours does, and what a payload would have to do
WIRED = (
    "pickle.find_class",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
)
_tripped: list[str] | None = None


def _tripwire(event: str, arguments: tuple[Any, ...]) -> None:
    if _tripped is not None and event.startswith(WIRED):
        _tripped.append(f"{event} {ascii(arguments)[:200]}")


# for the life of the process: an audit hook cannot be taken out again
sys.addaudithook(_tripwire)


@dataclass(frozen=True)
class Result:
    """What a command line left: exit status, stdout, stderr."""

    exit: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def codes(self) -> list[str]:
        """The codes of the diagnostics in a JSON answer."""
        return [d["code"] for d in self.json["diagnostics"]]


def run(*arguments: object, cwd: Path | None = None) -> Result:
    """One command line in this process, under the tripwire."""
    from migrate.cli.main import run as run_commands

    global _tripped

    out, err = io.StringIO(), io.StringIO()
    before = os.getcwd()
    try:
        if cwd is not None:
            os.chdir(cwd)
        _tripped = seen = []
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run_commands([str(a) for a in arguments])
    finally:
        _tripped = None
        os.chdir(before)
    assert not seen, seen
    return Result(status, out.getvalue(), err.getvalue())


def done(*arguments: object, cwd: Path | None = None, exit: int = 0) -> Result:
    """`run` that must leave with the given status."""
    result = run(*arguments, cwd=cwd)
    assert result.exit == exit, f"exit {result.exit} instead of {exit}\n{result.out}{result.err}"
    return result


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def spawn(*arguments: object, cwd: Path | None = None, **keywords: Any) -> subprocess.Popen[str]:
    """`python -m migrate …` as a process of its own, its output in pipes."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "migrate", *(str(a) for a in arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=pipe, stderr=pipe, text=True, **keywords
    )


def shell(*arguments: object, cwd: Path | None = None) -> Result:
    """`python -m migrate …` in a process of its own, to its end."""
    child = spawn(*arguments, cwd=cwd)
    out, err = child.communicate(timeout=HANG)
    return Result(child.returncode, out, err)


def length(dtype: str, shape: Sequence[int]) -> int:
    n = SIZES[dtype]
    for size in shape:
        n *= size
    return n


def content(name: str, nbytes: int) -> bytes:
    """Bytes that depend on the name, different in every block."""
    seed = hashlib.sha256(name.encode()).digest()
    blocks = (
        hashlib.blake2b(seed + i.to_bytes(8, "little")).digest() for i in range(-(-nbytes // 64))
    )
    return b"".join(blocks)[:nbytes]


def safetensors(
    path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None, *, holes: bool = False
) -> Path:
    """Writes a .safetensors file. `holes` leaves the data to the file system: zeros that take no
    room.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape, *_) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + length(dtype, shape)],
        }
        offset += length(dtype, shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if holes:
            file.truncate(8 + len(text) + offset)
            return path
        for name, (dtype, shape, *given) in tensors.items():
            file.write(given[0] if given else content(name, length(dtype, shape)))
    return path


def shards(folder: Path, parts: Sequence[Tensors], *, holes: bool = False) -> Path:
    """Writes a folder of shards with their index."""
    weights, total = {}, 0
    for i, tensors in enumerate(parts, 1):
        name = f"model-{i:05}-of-{len(parts):05}.safetensors"
        safetensors(folder / name, tensors, holes=holes)
        for key, (dtype, shape, *_) in tensors.items():
            weights[key] = name
            total += length(dtype, shape)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weights})
    )
    return folder


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a file or folder as (dtype, shape, bytes), read with the standard library."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    out = {}
    for file in files:
        raw = file.read_bytes()
        (n,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + n])
        header.pop("__metadata__", None)
        for key, entry in header.items():
            start, stop = entry["data_offsets"]
            out[key] = (entry["dtype"], tuple(entry["shape"]), raw[8 + n + start : 8 + n + stop])
    return out


def fingerprint(path: Path) -> dict[str, str]:
    """The sha256 of every file of a checkpoint: what must not change."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def rules(folder: Path, text: str, name: str = "rules.yaml") -> Path:
    """A rule file of edge demo v1 -> v2; `text` is everything from `rules:` on."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"id: demo/v2/{path.stem}\ntitle: a change\nlineage: demo\nedge: [v1, v2]\n{text}"
    )
    return path


def mixtral(
    layers: int = 2, experts: int = 2, hidden: int = 4, middle: int = 6
) -> dict[str, tuple[str, list[int]]]:
    """The keys of a small Mixtral in the old layout."""
    out: dict[str, tuple[str, list[int]]] = {"model.embed_tokens.weight": ("BF16", [8, hidden])}
    for i in range(layers):
        at = f"model.layers.{i}"
        out[f"{at}.input_layernorm.weight"] = ("BF16", [hidden])
        for w in "qkvo":
            out[f"{at}.self_attn.{w}_proj.weight"] = ("BF16", [hidden, hidden])
        out[f"{at}.block_sparse_moe.gate.weight"] = ("BF16", [experts, hidden])
        for e in range(experts):
            for w, shape in (
                ("w1", [middle, hidden]),
                ("w2", [hidden, middle]),
                ("w3", [middle, hidden]),
            ):
                out[f"{at}.block_sparse_moe.experts.{e}.{w}.weight"] = ("BF16", shape)
    out["model.norm.weight"] = ("BF16", [hidden])
    out["lm_head.weight"] = ("BF16", [8, hidden])
    return out
