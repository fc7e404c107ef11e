"""How long a codec alone takes for the tensors of a checkpoint that lie in memory, in threads.

    in_memory.py SOURCE CODEC ARGUMENTS decode|encode THREADS

ARGUMENTS are the codec's own, as JSON. Prints seconds; reading, and memory that is touched for the
first time, are not among them.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import compare
import numpy as np

from migrate.codecs import get
from migrate.core.spec import Spec
from migrate.elements.raw import carrier

# the matrices that the benchmark's rules encode
LINEAR = (
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj",
    "down_proj",
)  # fmt: skip
DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F32": "float32"}
Held = tuple[Spec, Any]


def held(place: compare.Place) -> Held:
    """A stored tensor, read whole."""
    dtype = DTYPES[place.dtype]
    count = prod(place.shape)
    array = np.fromfile(place.file, carrier(dtype), count, offset=place.offset)
    return Spec(dtype, place.shape), array.reshape(place.shape)


class Worker:
    """One thread's tensors and memory."""

    def __init__(self, codec: Any, args: Any, tensors: list[list[Held]]) -> None:
        self._codec, self._args, self._tensors = codec, args, tensors
        self._rooms: dict[tuple[int, tuple[int, ...], str], Any] = {}

    def decode(self) -> None:
        for parts in self._tensors:
            specs = [spec for spec, _ in parts]
            spec = self._codec.decoded(self._args, specs, "bfloat16")
            box = tuple((0, n) for n in spec.shape)
            arrays = [array for _, array in parts]
            self._codec.decode(self._args, arrays, specs, spec.dtype, box, self._room(0, spec))

    def encode(self) -> None:
        for ((spec, array),) in self._tensors:
            memo: dict[str, Any] = {}
            more = {}
            if self._codec.surveys(self._args, spec):
                whole = tuple((0, n) for n in spec.shape)
                more = {"survey": self._codec.survey(self._args, array, spec, whole)}
            for number, part in enumerate(self._codec.encoded(self._args, spec)):
                if part is None:
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


def main() -> None:
    source, name, arguments, verb, threads = sys.argv[1:]
    codec: Any = get(name)
    given = json.loads(arguments)
    args = codec.Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    stored = compare.tensors(Path(source))
    if verb == "decode":
        scaled = [key for key in stored if f"{key}_scale_inv" in stored]
        tensors = [[held(stored[key]), held(stored[f"{key}_scale_inv"])] for key in scaled]
    else:
        tensors = [[held(p)] for key, p in stored.items() if key.split(".")[-2:-1] in _LINEARS]
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


_LINEARS = [[name] for name in LINEAR]


if __name__ == "__main__":
    main()
