"""What another process does with a state that it was sent, for processes that are spawned."""

from __future__ import annotations

from typing import Any

import torch


def touch(into: Any, back: Any) -> None:
    """Says what arrived, writes where it is told to, and reads again until it is told to stop."""
    while (message := into.recv()) is not None:
        what, held = message
        if what == "take":
            state = held
            back.send({name: value.tolist() for name, value in state.items()})
        elif what == "about":
            back.send((state.nbytes, state.devices, state["a"] is state["tied"], state.restore()))
        elif what == "save":
            back.send(state.save(held).path)
        elif what == "bits":
            back.send((held.dtype, held.view(torch.uint8).tolist()))
        elif what == "write":
            state[held].fill_(7)
            back.send("written")
        elif what == "let go":
            del state
            back.send("gone")
        else:
            back.send(state[held].clone().tolist())


def describe(state: Any, back: Any) -> None:
    """What a process that was started with a state sees in it."""
    one, other = state["w"], state["again"]
    other[0] = 5.0
    back.send(
        {
            "tied": one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr(),
            "seen": one.flatten()[0].item(),
            "classes": sorted(type(x).__name__ for x in state.values()),
            "sparse": state["sparse"].to_dense().tolist(),
            "conj": torch.view_as_real(state["conj"].resolve_conj()).tolist(),
            "grad": state["p"].requires_grad,
        }
    )
