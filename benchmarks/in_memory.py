"""How long a codec alone takes for the tensors of a checkpoint that lie in memory, in threads.

    in_memory.py SOURCE CODEC ARGUMENTS decode|encode THREADS NAMES [ENCODED]

ARGUMENTS are the codec's own, NAMES what the names of parts add to that of a tensor by their role,
both as JSON. ENCODED is a folder that holds these parts of the tensors that are encoded. Prints
seconds; reading, and memory that is touched for the first time, are not among them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import compare
import numpy as np

from migrate import formats
from migrate.codecs import get
from migrate.core.spec import Spec
from migrate.elements.raw import carrier
from migrate.running.gather import stored_reader

DTYPES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "U8": "uint8", "I8": "int8", "I32": "int32", "I64": "int64",
}  # fmt: skip
# codecs that encode by torch's cast where it is loaded
CAST = {"fp8", "fp8-block", "mxfp8"}
Held = tuple[Spec, Any]


def held(place: compare.Place) -> Held:
    """A stored tensor, read whole."""
    dtype = DTYPES[place.dtype]
    count = prod(place.shape)
    array = np.fromfile(place.file, carrier(dtype), count, offset=place.offset)
    return Spec(dtype, place.shape), array.reshape(place.shape)


def gguf_parts(folder: Path) -> dict[str, Held]:
    """The tensors of a folder of GGUF and their types, read whole."""
    found: dict[str, Held] = {}
    with contextlib.closing(formats.open(folder)) as source:
        for key, stored in source.index.tensors.items():
            spec = stored.spec
            raw = memoryview(bytearray(spec.nbytes))
            stored_reader(source, key).read(0, raw)
            found[key] = spec, np.frombuffer(raw, carrier(spec.dtype)).reshape(spec.shape)
    return found


class Worker:
    """One thread's tensors and memory."""

    def __init__(self, codec: Any, args: Any, tensors: list[list[Held | None]]) -> None:
        self._codec, self._args, self._tensors = codec, args, tensors
        self._rooms: dict[tuple[int, tuple[int, ...], str], Any] = {}

    def decode(self) -> None:
        for parts in self._tensors:
            specs, arrays = ([one and one[i] for one in parts] for i in (0, 1))
            args = self._args
            if planning := getattr(self._codec, "planning", ()):
                roles = self._codec.parts
                values = {r: arrays[roles.index(r)].tobytes() for r in planning}
                args = self._codec.settle(args, specs, values)
            dtype = (
                "bfloat16" if "bfloat16" in (self._codec.numbers or ("bfloat16",)) else "float16"
            )
            spec = self._codec.decoded(args, specs, dtype)
            box = tuple((0, n) for n in spec.shape)
            self._codec.decode(args, arrays, specs, spec.dtype, box, self._room(0, spec))

    def encode(self) -> None:
        for one in self._tensors:
            spec, array = one[0] or (Spec("bfloat16", ()), None)
            memo: dict[str, Any] = {}
            more = {}
            if self._codec.surveys(self._args, spec):
                whole = tuple((0, n) for n in spec.shape)
                more = {"survey": self._codec.survey(self._args, array, spec, whole)}
            for number, part in enumerate(self._codec.encoded(self._args, spec)):
                if part is None or self._codec.parts[number] in self._codec.planning:
                    continue
                box, out = tuple((0, n) for n in part.shape), self._room(number, part)
                given = self._args, spec, number, box, out
                if number == 0 or not self._codec.recall(*given, memo, **more):
                    args, _, *rest = given
                    self._codec.encode(args, array, spec, *rest, None, memo, **more)

    def _room(self, number: int, spec: Spec) -> Any:
        name = number, spec.shape, spec.dtype
        if name not in self._rooms:
            self._rooms[name] = np.zeros(spec.shape, carrier(spec.dtype))
        return self._rooms[name]


def stems(stored: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """The names of tensors whose parts are there."""
    first, *others = names.values()
    every = [key.removesuffix(first) for key in stored if key.endswith(first)]
    return [stem for stem in every if all(stem + other in stored for other in others)]


def main() -> None:
    source, name, arguments, verb, threads, said, *encoded = sys.argv[1:]
    if verb == "encode" and name in CAST:
        import torch  # noqa: F401  # whose cast is faster than what commands do without it
    codec: Any = get(name)
    given, names = json.loads(arguments), json.loads(said)
    args = codec.Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    tensors: list[list[Held | None]]
    stored = compare.tensors(Path(source))
    if verb == "decode" and not stored:
        parts = gguf_parts(Path(source))
        tensors = [[parts[stem + names[r]] for r in codec.parts] for stem in stems(parts, names)]
    elif verb == "decode":
        tensors = [
            [held(stored[stem + names[r]]) if r in names else None for r in codec.parts]
            for stem in stems(stored, names)
            # other formats of the same folder have parts of the same names
            if given.get("weight") in {None, DTYPES[stored[stem + names["weight"]].dtype]}
        ]
    else:
        codes = compare.tensors(Path(encoded[0]))
        keys = [key for stem in stems(codes, names) for key in (stem, f"{stem}.weight")]
        tensors = [[held(stored[key])] for key in keys if key in stored]
    workers = [Worker(codec, args, tensors[i :: int(threads)]) for i in range(int(threads))]
    # once for imports, tables and memory
    for worker in workers:
        getattr(worker, verb)()
    started = [threading.Thread(target=getattr(worker, verb)) for worker in workers]
    begun = time.perf_counter()
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    print(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
