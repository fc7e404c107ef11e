"""What a codec made for one box is freed with it: the command line hardly ever looks for cycles, so
that entries of grids that sat in one grew with the tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from migrate import codecs
from migrate.codecs.base import OpError
from migrate.elements.raw import carrier
from migrate.testing import codeckit


@contextmanager
def without_cycles() -> Iterator[None]:
    """Fails if what is made inside can only be freed by looking for cycles."""
    gc.collect()
    # what is there already is not looked at again
    gc.freeze()
    gc.disable()
    try:
        yield
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("name", codecs.names())
def test_boxes_are_freed_at_once(name: str) -> None:
    codec = codecs.get(name)
    if codec.encodes:
        args, spec = next(iter(codec.samples()))
        array, specs = codeckit.numbers(spec), codec.encoded(args, spec)
        parts = codeckit.encoded(codec, args, array, spec)
        made = [None if p is None else np.empty(p.shape, carrier(p.dtype)) for p in specs]
        survey = codeckit.surveyed(codec, args, array, spec)
        with without_cycles():
            for number, out in enumerate(made):
                if out is not None:
                    whole = tuple((0, n) for n in out.shape)
                    needed = codec.encode_needs(args, spec, number, whole)
                    given = array[tuple(slice(*side) for side in needed)]
                    codec.encode(args, given, spec, number, whole, out, memo={}, **survey)
    else:
        args, stored = next(iter(codec.stored()))
        specs, parts = ([None if p is None else p[i] for p in stored] for i in (0, 1))
    args = codeckit.settled(codec, args, parts, specs)
    for dtype in codeckit.DECODED:
        try:
            codeckit.decoded(codec, args, parts, specs, dtype)
        except OpError:
            continue
        with without_cycles():
            codeckit.decoded(codec, args, parts, specs, dtype)
