"""Genuine extra states, changed: whatever is still read is what an unpickler that runs nothing
makes of it.

Nothing that has scales, tensors, bytes or names of its own in it may count as stateless, because
that goes without a question. Seeded, so that a failure comes again.
"""

from __future__ import annotations

import io
import pickletools
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from marks import thorough
from pickle_oracle import Oracle, Pid, Recording, Stub

from migrate.core.errors import CheckpointError
from migrate.extra_state.decode import decode
from migrate.extra_state.verdict import judge, judged

VECTORS = sorted(
    p
    for p in (Path(__file__).resolve().parents[1] / "data" / "te").iterdir()
    if p.name.endswith((".pkl", ".bytesio.pt"))
)
FEW, MANY = 30, 300
TE = "transformer_engine.common.recipe"
SCALES = {"scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"}
STATE = SCALES | {
    "scale_inv_fwd",
    "scale_inv_bwd",
    "global_fp8_buffer",
    "global_fp8_recompute_buffer",
    "global_fp8_state",
}
CLASSES = (
    "MXFP8BlockScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "NVFP4BlockScaling",
    "CustomRecipe",
    "MMParams",
    "QParams",
)
# what may stand in a state that keeps nothing
KNOWN = {(TE, name) for name in (*CLASSES, "Format", "_FormatHelper")} | {
    ("collections", "OrderedDict"),
    ("builtins", "getattr"),
}
WORDS = (
    *sorted(SCALES),
    "recipe",
    "MXFP8BlockScaling",
    "DelayedScaling",
    "extra_fp8_variables",
    "num_gemms",
    "forward",
    "local_recipes",
)


def held(root: Any) -> Iterator[tuple[Any, str, Any]]:
    """(value, key, owner) of all that can be reached: the text key that it stands under, and the
    class in whose fields.
    """
    seen: set[int] = set()
    stack: list[tuple[Any, str, Any]] = [(root, "", None)]
    while stack:
        value, key, owner = stack.pop()
        yield value, key, owner
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None), Recording)):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            pairs = [*value.items()]
        elif isinstance(value, Stub):
            pairs = [*value.pairs, *(("", v) for v in (*value.arguments, *value.items))]
            stack += [
                (v, k, type(value))
                for state in value.states
                if isinstance(state, dict)
                for k, v in state.items()
            ]
            stack += [(state, "", None) for state in value.states if not isinstance(state, dict)]
            yield type(value), "", None
        else:
            pairs = [("", v) for v in (value.identity if isinstance(value, Pid) else value)]
        stack += [(v, k if isinstance(k, str) else "", None) for k, v in pairs] + [
            (k, "", None) for k, _ in pairs
        ]


def kept(payload: bytes) -> set[str]:
    """What an unpickler that runs nothing finds in a state beside settings."""
    found: set[str] = set()
    if payload.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            found |= {"a storage" for name in archive.namelist() if "/data/" in name}
            payload = archive.read(
                next(name for name in archive.namelist() if name.endswith("data.pkl"))
            )
    if not payload:
        return found
    unpickler = Oracle(payload)
    own = set()
    for value, key, owner in held(unpickler.load()):
        if key in STATE:
            found.add(key)
        if isinstance(value, Recording):
            factory = key == "qfactory" and owner is not None and owner.name == "CustomRecipe"
            own |= {(value.module, value.name)} if factory else set()
            found |= (
                set()
                if factory or (value.module, value.name) in KNOWN
                else {f"{value.module}.{value.name}"}
            )
        elif isinstance(value, (bytes, bytearray, Pid, set, frozenset)):
            found.add(type(value).__name__)
    # names that were looked up and are nowhere to be seen
    return found | {f"{module}.{name}" for module, name in unpickler.stubs.keys() - KNOWN - own}


def mutants(raw: bytes, chance: random.Random, count: int) -> Iterator[bytes]:
    """The pickle with bytes changed, cut, with opcodes swapped, left out or doubled, with one word
    for another.
    """
    try:
        ops = [(op, at) for op, _, at in pickletools.genops(raw)]
    except ValueError:
        ops = []
    kin: dict[Any, list[int]] = {}
    for op in pickletools.opcodes:
        kin.setdefault(op.arg, []).append(ord(op.code))
    for _ in range(count):
        made, way = bytearray(raw), chance.randrange(8)
        at = chance.randrange(len(raw))
        if way < 2 or len(ops) < 4:
            made[at] = chance.choice((chance.randrange(256), made[at] ^ (1 << chance.randrange(8))))
        elif way == 2:
            made = made[:at] + b"." * chance.randrange(2)
        elif way < 5:
            op, at = chance.choice(ops)
            made[at] = chance.choice(kin[op.arg])
        elif way < 7:
            first = chance.randrange(len(ops) - 2)
            start, end, after = (at for _, at in ops[first : first + 3])
            made[start:after] = chance.choice(
                (
                    raw[end:after],
                    raw[start:end] * 2 + raw[end:after],
                    raw[end:after] + raw[start:end],
                )
            )
        else:
            old, new = (chance.choice(WORDS).encode() for _ in range(2))
            made = made.replace(b"\x8c%c%s" % (len(old), old), b"\x8c%c%s" % (len(new), new), 1)
        if (
            raw[2:3] == b"\x95"
            and made[2:3] == b"\x95"
            and len(made) > 11
            and chance.random() < 0.7
        ):
            made[3:11] = (len(made) - 11).to_bytes(8, "little")
        yield bytes(made)


def wrapped(archive: bytes, pickle: bytes) -> bytes:
    """The archive with another pickle in it, and the right checksum."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            held = pickle if entry.filename.endswith("data.pkl") else old.read(entry)
            new.writestr(zipfile.ZipInfo(entry.filename), held)
    return out.getvalue()


def cases(path: Path, count: int) -> Iterator[bytes]:
    raw, chance = path.read_bytes(), random.Random(path.name)
    if raw.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            inner = archive.read(
                next(name for name in archive.namelist() if name.endswith("data.pkl"))
            )
        yield from (wrapped(raw, made) for made in mutants(inner, chance, count))
    elif raw:
        yield from mutants(raw, chance, count)


def survey(
    path: Path, verdict: Callable[[bytes], str], count: int
) -> tuple[list[tuple[str, set[str], bytes]], int]:
    """What is wrong with verdicts on mutants, and how many were stateless."""
    wrong, stateless = [], 0
    for payload in cases(path, count):
        try:
            sort = verdict(payload)
        except CheckpointError:
            continue
        stateless += sort == "stateless"
        held = kept(payload)
        delayed = bool(held & SCALES) or any(name.endswith("DelayedScaling") for name in held)
        if (
            (sort == "stateless" and held)
            or (sort == "legacy" and held & SCALES)
            or (sort == "delayed" and not delayed)
        ):
            wrong.append((sort, held, payload))
    return wrong, stateless


def some_of(paths: list[Path]) -> list[Any]:
    """Few mutants of each; under the mark `thorough`, many."""
    return thorough([(path, n) for n in (FEW, MANY) for path in paths], default=len(paths))


@pytest.mark.parametrize(
    ("path", "count"), some_of(VECTORS), ids=lambda of: getattr(of, "name", None)
)
def test_nothing_that_keeps_state_is_called_stateless(path: Path, count: int) -> None:
    wrong, _ = survey(path, lambda payload: judged(payload, "x").verdict.sort, count)
    assert not wrong


@pytest.mark.parametrize("count", thorough([FEW, MANY]))
def test_some_mutants_are_still_stateless(count: int) -> None:
    assert (
        sum(
            survey(path, lambda payload: judge(decode(payload, "x")).sort, count)[1]
            for path in VECTORS
            if "MXFP8" in path.name
        )
        > count // 6
    )


def test_a_verdict_that_does_not_look_is_caught() -> None:
    def careless(payload: bytes) -> str:
        decode(payload, "x")
        return "stateless"

    stateful = {
        "v2.17_linear_DelayedScaling.pkl",
        "v1.13_linear_DelayedScaling.bytesio.pt",
        "crafted_scale_inv_only.pkl",
    }
    suspects = [path for path in VECTORS if path.name in stateful]
    assert {path.name for path in suspects if survey(path, careless, 40)[0]} == stateful


@pytest.mark.parametrize(
    ("path", "count"),
    some_of([p for p in VECTORS if "Delayed" in p.name]),
    ids=lambda of: getattr(of, "name", None),
)
def test_a_mutant_is_judged_alike_after_its_like_and_alone(path: Path, count: int) -> None:
    judged(path.read_bytes(), "x")
    for payload in cases(path, count // 2):
        answers = []
        for ask in (lambda held: judged(held, "x").verdict, lambda held: judge(decode(held, "x"))):
            try:
                answers.append(ask(payload))
            except CheckpointError as error:
                answers.append(error.diagnostics[0].code)
        assert answers[0] == answers[1]
