"""Writes expected.json: what each file here holds, worked out without the package that is tested.

    python tests/data/te/worked_out.py

Streams are read by Python's own unpickler, whose `find_class` gives inert recorders; archives by
`zipfile`. Numbers are taken from the raw bytes behind the keys of each storage. The files come from
the releases that their names say (`get_extra_state` of that release, run on CPU); `crafted_*` were
made by hand. `te_verdicts.json` is what Transformer Engine 2.20.2 itself says of each.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCALING = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
STATELESS = (
    "MXFP8BlockScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "NVFP4BlockScaling",
    "CustomRecipe",
)
FORMATS = {(448, 57344): "HYBRID", (448, 448): "E4M3", (57344, 57344): "E5M2", (6, 6): "E2M1"}


class Thing:
    """Whatever a stream names: it remembers its name, its arguments and its state, and does
    nothing.
    """

    name = ""

    def __new__(cls, *arguments: Any) -> Thing:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs = {**getattr(self, "pairs", {}), key: value}


class Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return lambda text, codec: text.encode("latin-1")
        return type(name, (Thing,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def tensor(thing: Thing, storages: dict[str, bytes]) -> dict[str, Any]:
    storage, offset, shape, _, _, _ = thing.arguments
    numel = 1
    for size in shape:
        numel *= size
    if isinstance(storage, Thing):
        (stream,) = storage.arguments
        raw = stream[len(stream) - 4 * int.from_bytes(_count(stream), "little") :]
    else:
        raw = storages[storage[2]]
    data = raw[4 * offset : 4 * (offset + numel)]
    assert len(data) == 4 * numel
    return {"shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}


def _count(stream: bytes) -> bytes:
    """The eight bytes in front of the numbers: behind the fifth pickle."""
    file = io.BytesIO(stream)
    for _ in range(5):
        Reader(file).load()
    return file.read(8)


def state(held: dict[str, Any], storages: dict[str, bytes]) -> dict[str, Any]:
    recipe = held.get("recipe")
    extras = held.get("extra_fp8_variables") or {}
    tensors = {
        key: tensor(value, storages)
        for key, value in held.items()
        if key.startswith(("scale_", "amax_history_"))
    }
    histories = [t["shape"][0] for key, t in tensors.items() if key.startswith("amax")]
    if recipe is not None:
        (helper,) = recipe.state["fp8_format"].arguments
        pair = helper.arguments
    else:
        pair = extras.get("fp8_max_fwd"), extras.get("fp8_max_bwd")
    names = [] if recipe is None else [type(recipe).__name__]
    names += [type(r).__name__ for r in extras.get("local_recipes", [])]
    if any(key in held for key in SCALING) or "DelayedScaling" in names:
        sort = "delayed"
    elif not held:
        sort = "stateless"
    elif recipe is None:
        sort = "legacy"
    else:
        sort = "stateless" if set(names) <= set(STATELESS) else "unknown"
    return {
        "sort": sort,
        "recipe": None if recipe is None else type(recipe).__name__,
        "format": FORMATS.get(pair),
        "history": histories[0] if histories else None,
        "tensors": tensors,
    }


def named(value: Any) -> list[str]:
    """The dotted names of all calls in a value."""
    if isinstance(value, Thing):
        return [value.name, *named(list(value.arguments)), *named(value.state)]
    if isinstance(value, dict):
        return [n for pair in value.items() for part in pair for n in named(part)]
    return [n for part in value for n in named(part)] if isinstance(value, (list, tuple)) else []


def read(path: Path) -> Any:
    storages: dict[str, bytes] = {}
    if path.suffix == ".pt":
        with zipfile.ZipFile(path) as archive:
            names = {name.split("/", 1)[1]: name for name in archive.namelist()}
            storages = {
                name[5:]: archive.read(full)
                for name, full in names.items()
                if name.startswith("data/")
            }
            stream = archive.read(names["data.pkl"])
    else:
        stream = path.read_bytes()
    if not stream:
        return {
            "": {
                "sort": "stateless",
                "recipe": None,
                "format": None,
                "history": None,
                "tensors": {},
            }
        }
    try:
        value = Reader(io.BytesIO(stream)).load()
    except pickle.UnpicklingError:
        return {"": {"sort": "broken"}}
    if any(name.startswith("posix.") for name in named(value)):
        return {"": {"sort": "unknown"}}
    if value and set(value) <= {"input", "param", "grad_output"}:
        return {mode: state(held, storages) for mode, held in value.items()}
    return {"": state(value or {}, storages)}


if __name__ == "__main__":
    files = sorted([*HERE.glob("*.pkl"), *HERE.glob("*.bytesio.pt")])
    found = {path.name: read(path) for path in files}
    (HERE / "expected.json").write_text(json.dumps(found, indent=1) + "\n")
