"""Both checkpoints, read once: what is noticed of each tensor on the way.

That is a digest, whether it has so few values that equal bytes may be an accident, and of large
checkpoints digests of its blocks, by which what only moves whole blocks is found and compared, and
some of the runs of what seems to move otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from threading import Event
from typing import TYPE_CHECKING, Any

from ...core.spec import Spec
from ...running.resources import run_together
from .blocks import BlockDigests, kept_whole
from .compared import ComparedTensor
from .samples import Runs, RunSampler, is_sampled

if TYPE_CHECKING:
    import numpy as np

    from ...source.index import Source

    Array = np.ndarray[Any, Any]

# distinct elements below which equal bytes may be an accident
FEW = 8


class _FewValues:
    """Whether a tensor has so few values that they say little about where they come from."""

    def __init__(self) -> None:
        self._known: Array | None = None
        self._many = False

    def take(self, flat: Array, size: int) -> None:
        """Looks at a stretch of a tensor of `size` elements."""
        import numpy as np

        if self._many:
            return
        if flat.dtype.kind == "V":
            flat = np.ascontiguousarray(flat).view("<u8")
        if size == 1 and flat.dtype.itemsize >= 4:
            # a number that somebody chose has trailing zeros, a trained one does not
            self._many = bool(int(flat[0]) & 0xFF) and int(flat[0]) >= 1 << 20
            return
        known = np.unique(flat[:64]) if self._known is None else self._known
        if self._known is None and len(known) < FEW:
            known = np.unique(flat[:4096])
        if len(known) < FEW:
            left = flat
            for value in known:
                left = left[left != value]
            known = np.union1d(known, left)
        self._known, self._many = known, len(known) >= FEW

    def __bool__(self) -> bool:
        return not self._many


class SideReader:
    """Reads all tensors of one side once: digests, whether they have few values, and some runs,
    but for those of `unsampled`.
    """

    def __init__(self, source: Source, specs: Mapping[str, Spec], bits: int) -> None:
        self._source, self._specs, self._bits = source, specs, bits
        self.unsampled: Collection[Spec] = ()
        self.keys: dict[tuple[str, bytes], list[str]] = defaultdict(list)
        self.few: set[tuple[str, bytes]] = set()
        self.runs: dict[str, Runs] = {}
        self.blocks = BlockDigests(source, bits)
        self.error: BaseException | None = None

    def read(self, stopped: Callable[[], bool]) -> None:
        """Reads until it is done or `stopped`."""
        import xxhash

        for key, spec in self._specs.items():
            if stopped():
                return
            hashed, values = xxhash.xxh3_128(), _FewValues()
            whole = self._bits > 0 and self.blocks.fit(spec)
            held: list[bytes] = []
            sampled = is_sampled(spec, self._bits) and spec not in self.unsampled
            sampler = RunSampler(spec, self._bits) if sampled else None
            tensor = ComparedTensor(key, spec, self._source)
            beyond = sampler.beyond if sampler else 0
            for start, count, flat in tensor.stretches(beyond, self.blocks.size if whole else 1):
                own = flat[:count]
                if whole:
                    held.append(self.blocks.take(own))
                    hashed.update(held[-1])
                else:
                    hashed.update(own.view("u1").data)
                values.take(own, spec.numel)
                if sampler is not None:
                    sampler.take(start, count, flat)
            if whole:
                self.blocks.keep(key, b"".join(held))
            label = (spec.dtype, hashed.digest())
            self.keys[label].append(key)
            if values:
                self.few.add(label)
            if sampler is not None:
                self.runs[key] = sampler.runs()


def read_both(
    sides: tuple[tuple[Source, Mapping[str, Spec]], tuple[Source, Mapping[str, Spec]]], bits: int
) -> tuple[SideReader, SideReader]:
    """Both sides, read at the same time where they are large."""
    (old, olds), (new, news) = sides
    readers = SideReader(old, olds, bits), SideReader(new, news, bits)
    if bits:
        whole = kept_whole(readers[0].blocks, readers[1].blocks, (olds, news))
        readers[0].unsampled = readers[1].unsampled = whole
    left, stop = list(readers), Event()

    def work(_: int) -> None:
        while not stop.is_set():
            try:
                reader = left.pop(0)
            except IndexError:
                return
            try:
                reader.read(stop.is_set)
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                reader.error = error
                stop.set()

    run_together(work, 2 if bits else 1, stop.set)
    for reader in readers:
        if reader.error is not None:
            raise reader.error
    return readers
