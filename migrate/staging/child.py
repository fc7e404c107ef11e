"""The process that writes beside the trainer: one job, then it ends.

It gets the state as a stream for the decoder of files, which executes nothing, and the memory of
its tensors as descriptors, so it needs neither the trainer's classes nor, where bytes only move,
torch.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..core.errors import Diagnostic, MigrateError, Span, fail, raise_all
from ..formats.torchstream import StateSource, open_stream
from ..planning.request import make_request
from ..running.fillers import die_with_parent
from ..running.job import write_checkpoint
from ..running.output_shapes import shape_of
from ..running.prepare import plan_for
from ..running.resources import read_options

# bytes of the number that says how long the header is
LENGTH = 8
_SPAN = tuple(one.name for one in fields(Span))


def pack(diagnostics: tuple[Diagnostic, ...]) -> list[dict[str, Any]]:
    """Diagnostics as JSON."""
    return [
        {
            "code": d.code,
            "message": d.message,
            "spans": [{name: getattr(span, name) for name in _SPAN} for span in d.spans],
            "notes": list(d.notes),
            "help": d.help,
            "severity": d.severity,
            "permit": d.permit,
        }
        for d in diagnostics
    ]


def raise_packed(packed: list[dict[str, Any]]) -> None:
    """Raises the error that `pack` was given the diagnostics of."""
    raise_all(
        Diagnostic(
            **{
                **one,
                "spans": tuple(Span(**span) for span in one["spans"]),
                "notes": tuple(one["notes"]),
            }
        )
        for one in packed
    )


def main() -> None:
    """Reads a job from the standard input, does it, and writes lines of JSON to the standard
    output: how far it is, and how it ended.
    """
    # killed with its trainer, whose job is void then; and nothing is published
    die_with_parent()
    answers = os.dup(1)
    # what libraries print is no answer
    os.dup2(2, 1)

    def say(**said: Any) -> None:
        os.write(answers, json.dumps(said).encode() + b"\n")

    with os.fdopen(0, "rb") as given:
        head = json.loads(given.read(int.from_bytes(given.read(LENGTH), "little")))
        stream = given.read()
    if os.getppid() != head["trainer"]:
        return
    if head["stored"]:
        # what is in a store is removed there before the process ends
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        source = _source(head, stream)
        request = make_request(**head["arguments"], backwards=None)
        options = read_options(
            **head["options"], threads=1, progress=lambda done, total: say(progress=[done, total])
        )
        folder, request = shape_of(head["name"], source.format, request)
        planned = plan_for(source, request, folder, options.max_shard_size)
        if planned.digest != head["digest"]:
            fail(
                "M903",
                "the plan is not what it was when the snapshot was migrated: rule files have "
                "changed since",
                help="migrate the snapshot again, or leave rule files alone until jobs have ended",
            )
        report = write_checkpoint(lambda: source, head["out"], request, options, planned=planned)
    except KeyboardInterrupt:
        # the trainer does not wait for an answer
        return
    except MigrateError as error:
        say(diagnostics=pack(error.diagnostics))
    else:
        say(report=report.to_json())
    sys.stdout.flush()


def _source(head: Mapping[str, Any], stream: bytes) -> StateSource:
    maps: dict[int, memoryview] = {}
    storages = []
    for descriptor, begin, size in head["storages"]:
        if size and descriptor not in maps:
            maps[descriptor] = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        storages.append(maps[descriptor][begin : begin + size] if size else memoryview(b""))
    at = head["arguments"]["at"]
    return open_stream(stream, storages, head["label"], at, rest=head["rest"] == "carry")
