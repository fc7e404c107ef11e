"""Side files of migrate's own that somebody else wrote: `migrate.items.json` beside sound tensors,
its hash right.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archives import safetensors

from migrate.core.spec import spec
from migrate.source.index import specs_hash

FOLDERS: list[tuple[str, str, Callable[[Path, str], Path]]] = []
# sound files with values outside the allow-list
CARRIED = ("items-call", "items-dtensor", "items-mesh-of-a-tensor", "items-tensor-as-a-key")
ITEMS = "migrate.items.json"
MODULE = "torch.distributed"


def called(module: str, name: str, *arguments: Any, **more: Any) -> dict[str, Any]:
    return {"call": [[module, name], list(arguments)], **more}


def items(
    name: str,
    root: Callable[[str], Any],
    *,
    at: Any = (),
    parts: list[Any] | None = None,
    keys: tuple[str, ...] = ("a", "b"),
) -> None:
    def build(folder: Path, canary: str) -> Path:
        inside = folder / "ckpt"
        inside.mkdir()
        (inside / "model.safetensors").write_bytes(safetensors(dict.fromkeys(keys, b"abcd")))
        held = [{"at": list(at), "root": root(canary)}] if parts is None else parts
        output = specs_hash({key: spec("uint8", (4,)) for key in keys})
        document = {
            "format_version": "1.0",
            "kind": "items",
            "output": output,
            "carried": [],
            "parts": held,
        }
        (inside / ITEMS).write_text(json.dumps(document))
        return inside

    FOLDERS.append((f"items-{name}", "P1 T1", build))


def beside(value: Callable[[str], Any]) -> Callable[[str], Any]:
    """The value beside the tensors."""
    return lambda canary: {"dict": [["a"], ["b"], ["x", value(canary)]]}


def around(value: Any) -> Callable[[str], Any]:
    """The value beside the dict that rules work on."""
    return lambda canary: {"dict": [["m", {"dict": [["a"], ["b"]]}], ["x", value]]}


def touch(canary: str) -> dict[str, Any]:
    return called("posix", "mknod", canary)


def dtype(canary: str) -> dict[str, Any]:
    return called(
        "numpy",
        "dtype",
        "f4",
        False,
        True,
        state={"tuple": [3, "<", None, None, None, -1, -1, touch(canary)]},
    )


SHARD = called(
    "torch._tensor",
    "_rebuild_from_type_v2",
    {"name": ["torch._utils", "_rebuild_wrapper_subclass"]},
    {"name": [f"{MODULE}.tensor", "DTensor"]},
    {
        "tuple": [
            {"name": [f"{MODULE}.tensor", "DTensor"]},
            {"name": ["torch", "uint8"]},
            {"tuple": [4]},
            {"tuple": [1]},
            0,
            None,
            None,
            False,
        ]
    },
    {
        "dict": [
            ["_local_tensor", {"tensor": "a"}],
            [
                "_spec",
                called(
                    f"{MODULE}.tensor._dtensor_spec",
                    "DTensorSpec",
                    how="newobj",
                    state={
                        "dict": [
                            [
                                "placements",
                                {
                                    "tuple": [
                                        called(
                                            f"{MODULE}.tensor.placement_types",
                                            "Replicate",
                                            how="newobj",
                                        )
                                    ]
                                },
                            ]
                        ]
                    },
                ),
            ],
        ]
    },
)

items("call", beside(touch))
items(
    "call-as-state",
    lambda canary: {
        "dict": [
            ["a", {"tensor": "a", "parameter": True, "state": {"dict": [["q", touch(canary)]]}}],
            ["b"],
        ]
    },
)
items("call-in-a-numpy-dtype", beside(dtype))
items("no-part", lambda canary: None, parts=[])
items("no-part-and-no-tensor", lambda canary: None, parts=[], keys=())
items("dtensor", around(SHARD), at=["m"])
items(
    "mesh-of-a-tensor",
    around(
        called(
            f"{MODULE}.device_mesh",
            "DeviceMesh",
            how="newobj",
            state={"dict": [["mesh", {"tensor": "a"}]]},
        )
    ),
    at=["m"],
)
items("tensor-as-a-key", around({"dict": [[{"tensor": "a"}, 1]]}), at=["m"])
items("tensor-in-two-places", around({"dict": [["a"]]}), at=["m"])
items("tensor-of-nobody", lambda canary: {"dict": [["a"], ["b"], ["c"]]})
items("tensor-left-out", lambda canary: {"dict": [["a"]]})
items("path-to-nothing", lambda canary: {"dict": [["a"], ["b"]]}, at=["m"])


def _linked(folder: Path, canary: str) -> Path:
    inside = FOLDERS[0][2](folder, canary)
    (inside / ITEMS).unlink()
    (inside / ITEMS).symlink_to("/etc/passwd")
    return inside


def _piped(folder: Path, canary: str) -> Path:
    inside = FOLDERS[0][2](folder, canary)
    os.mkfifo(inside / "migrate.items.safetensors")
    return inside


FOLDERS += [("items-are-a-link-outside", "I2", _linked), ("items-tensors-are-a-pipe", "I2", _piped)]
