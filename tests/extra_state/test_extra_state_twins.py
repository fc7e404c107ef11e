"""A state that is compared with a known one is judged as if it had been decoded, whichever of its
bytes is another.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from marks import thorough
from te_streams import dumps, scaling, vector

from migrate.core.errors import CheckpointError
from migrate.extra_state import verdict
from migrate.extra_state.decode import LONGEST, Reference, decode, examine
from migrate.extra_state.record import Function, Parameters, Recipe, StateRecord


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "_TWINS", Reference())
    monkeypatch.setattr(verdict, "_EQUAL", {})


def plain(value: Any) -> Any:
    if isinstance(value, Recipe | Parameters):
        return value.module, value.name, plain(dict(value.fields))
    if isinstance(value, dict):
        return [(key, plain(held)) for key, held in value.items()]
    return (
        [plain(v) for v in value]
        if isinstance(value, list)
        else value
        if not isinstance(value, Function)
        else tuple(value)
    )


def structure(record: StateRecord) -> Any:
    states = {
        mode: s
        and (
            plain(s.recipe),
            {k: (t.dtype, t.shape) for k, t in s.tensors.items()},
            plain(dict(s.extras)),
            s.buffers,
        )
        for mode, s in record.states.items()
    }
    return record.form, record.api, record.releases, states


def outcome(judge: Any, payload: bytes) -> Any:
    try:
        found, record, odd, _ = judge(payload)
    except CheckpointError as error:
        return error.diagnostics[0].code, error.diagnostics[0].message
    return found, structure(record), odd


def decoded(payload: bytes) -> verdict.Judged:
    record = decode(payload, "x")
    return verdict.Judged(verdict.judge(record), record, verdict.oddities(record))


@pytest.mark.parametrize(
    "name",
    thorough(
        [
            "v0.8_linear_DelayedScaling.pkl",
            "HEAD_linear_DelayedScaling.pkl",
            "v1.13_ops_basic_linear_DelayedScaling.pkl",
        ]
    ),
)
def test_one_byte_that_is_another_changes_what_decoding_it_would_change(name: str) -> None:
    payload = vector(name)
    verdict.judged(payload, "x")
    assert verdict._TWINS.find_known(payload) is not None
    dice = random.Random(name)
    for at in range(0, len(payload), 1 if name.startswith("HEAD") else 4):
        changed = bytearray(payload)
        changed[at] ^= 1 << dice.randrange(8)
        assert outcome(lambda p: verdict.judged(p, "x"), bytes(changed)) == outcome(
            decoded, bytes(changed)
        ), at


def test_other_numbers_and_other_keys_make_a_twin() -> None:
    payloads = [dumps({**scaling(), "extra_fp8_variables": {"num_gemms": 1}}) for _ in range(2)]
    payloads += [
        dumps({**{k: t * n for k, t in scaling().items()}, "extra_fp8_variables": {"num_gemms": 1}})
        for n in range(3)
    ]
    first = verdict.judged(payloads[0], "x")
    same_length = [p for p in payloads if len(p) == len(payloads[0])]
    assert len(same_length) > 1
    assert all(verdict.judged(p, "x").like is first.like for p in same_length)


@pytest.mark.parametrize(
    ("name", "number", "what"),
    [
        ("scale_fwd", float("inf"), "holds numbers that are not finite"),
        ("scale_bwd", float("nan"), "holds numbers that are not finite"),
        ("amax_history_fwd", float("-inf"), "holds numbers that are not finite"),
        ("amax_history_bwd", float("nan"), "holds numbers that are not finite"),
        ("scale_fwd", 0.0, "holds a scale that is not positive"),
        ("scale_bwd", -1.0, "holds a scale that is not positive"),
        ("amax_history_bwd", -0.5, "holds a magnitude below zero"),
        ("scale_fwd", 1e-42, None),
        ("scale_fwd", 3.4e38, None),
        ("amax_history_fwd", 3.4e38, None),
        ("amax_history_fwd", 0.0, None),
    ],
)
def test_odd_numbers_are_found_in_a_state_that_is_decoded_and_in_one_that_is_compared(
    name: str, number: float, what: str | None
) -> None:
    def state() -> bytes:
        tensors = scaling()
        tensors[name].view(-1)[-1] = number
        return dumps({**tensors, "extra_fp8_variables": {"num_gemms": 1}})

    expected = () if what is None else (f"{name} {what}",)
    assert verdict.judged(state(), "x").odd == expected
    sound = [dumps({**scaling(), "extra_fp8_variables": {"num_gemms": 1}}) for _ in range(8)]
    assert all(verdict.judged(p, "x").odd == () for p in sound)
    assert any(verdict._TWINS.find_known(p) for p in sound)
    assert all(verdict.judged(state(), "x").odd == expected for _ in range(8))


def test_a_key_that_differs_between_its_two_places_is_no_twin() -> None:
    payload = dumps(scaling())
    verdict.judged(payload, "x")
    _, held = examine(payload, "x")
    key = held[0].node.id[2].encode()
    first = payload.index(key)
    for digit in (b"x", b"0" if key[:1] != b"0" else b"1"):
        changed = payload[:first] + digit + payload[first + 1 :]
        assert verdict._TWINS.find_known(changed) is None
        with pytest.raises(CheckpointError, match="another key"):
            verdict.judged(changed, "x")


def test_a_stream_that_stands_in_two_places_is_not_remembered() -> None:
    """Whether the numbers are in the first or the second of them could not be told."""
    payload = dumps({"scale_bwd": torch.ones(1)})
    _, held = examine(payload, "x")
    stream = held[0].stream
    hidden = (
        payload[:-2]
        + b"\x8c\x13extra_fp8_variables}\x8c\x01x"
        + b"B"
        + len(stream).to_bytes(4, "little")
        + stream
        + b"ss."
    )
    body = hidden[11:]
    unframed = hidden[:2] + body
    twins: Reference[int] = Reference()
    twins.add(payload, held, 1)
    found = twins.find_known(payload)
    assert found is not None
    assert found[0] == 1
    twins.add(unframed, held, 2)
    assert twins.find_known(unframed) is None


def test_long_states_and_states_without_storages_are_not_remembered() -> None:
    long = dumps({"amax_history_fwd": torch.ones(LONGEST // 4, 1)})
    twins: Reference[int] = Reference()
    twins.add(long, examine(long, "x")[1], 1)
    assert twins.find_known(long) is None
    twins.add(b"\x80\x04}.", [], 1)
    assert twins.find_known(b"\x80\x04}.") is None
