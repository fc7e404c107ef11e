"""Copies from devices: each on a stream of its own, behind what its device is doing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Arrival:
    """Says when copies are there. Without devices other than the CPU they always are."""

    __slots__ = ("_events", "_into")

    def __init__(
        self, events: Iterable[tuple[torch.device, Any]] = (), into: Sequence[memoryview] = ()
    ) -> None:
        """`into`: the memory that is copied into, which is kept until the copies are there."""
        self._events = list(events)
        self._into = into if self._events else ()

    def __del__(self) -> None:
        # memory that a device still writes to must not become somebody else's
        self.wait()

    def wait(self) -> None:
        """Returns when all copies are there."""
        for _, event in list(self._events):
            event.synchronize()
        self._events.clear()
        self._into = ()

    def done(self) -> bool:
        """Whether all copies are there."""
        return all(event.query() for _, event in self._events)

    def guard(self) -> None:
        """Makes the current stream of each device wait for its copies."""
        for device, event in self._events:
            torch.get_device_module(device).current_stream(device).wait_event(event)


class Streams:
    """A stream of low priority for each device that tensors are copied from."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def behind(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which copies from `device` run beside its work, after what is queued now."""
        if device.type == "cpu":
            return nullcontext()
        module = torch.get_device_module(device)
        stream = self._streams.get(device)
        if stream is None:
            low, _ = (
                module.Stream.priority_range()
                if hasattr(module.Stream, "priority_range")
                else (0, 0)
            )
            # the first thread's, if several come at once
            stream = self._streams.setdefault(device, module.Stream(device, priority=low))
        stream.wait_stream(module.current_stream(device))
        return module.stream(stream)  # type: ignore[no-any-return]

    def keep(self, source: torch.Tensor, device: torch.device) -> None:
        """Torch lends the memory of `source` to nobody else before the copies so far have run."""
        source.record_stream(self._streams[device])

    def mark(self, devices: Iterable[torch.device], into: Sequence[memoryview]) -> Arrival:
        """What is on the way from these devices, into this memory."""
        streams = self._streams
        return Arrival([(d, streams[d].record_event()) for d in devices if d in streams], into)
