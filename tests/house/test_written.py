"""One word for one thing, no circles: class names, imports, answers without a type, empty words."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import CHECKS, Module, modules


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_offends(check: str) -> None:
    offenders = CHECKS[check](modules())
    assert not offenders, "\n".join(offenders)


def package(tmp_path: Path, **sources: str) -> dict[str, Module]:
    """A package `migrate` of these modules; `a__b` lies in the folder `a`."""
    for name, text in sources.items():
        file = tmp_path.joinpath("migrate", *name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (tmp_path / "migrate", file.parent):
            (folder / "__init__.py").touch()
        file.write_text(text)
    return {m.name: m for m in (Module(tmp_path, f) for f in sorted(tmp_path.rglob("*.py")))}


def test_two_classes_of_one_name_are_found(tmp_path: Path) -> None:
    written = package(
        tmp_path, a="class One: ...\nclass Own: ...", b__c="class One:\n    class Own: ..."
    )
    assert CHECKS["class"](written) == ["One"]


@pytest.mark.parametrize(
    "text",
    [
        "from . import d",
        "from .d import D",
        "import migrate.b.d",
        "from migrate.b import d",
        "def f():\n    from ..b.d import D",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .d import D",
    ],
)
def test_modules_that_import_each_other_are_found(tmp_path: Path, text: str) -> None:
    written = package(tmp_path, b__c=text, b__d="from .e import E", b__e="from . import c")
    assert CHECKS["circle"](written) == ["migrate.b.c", "migrate.b.d", "migrate.b.e"]
    written = package(tmp_path, b__c=text, b__d="from .e import E", b__e="import sys")
    assert CHECKS["circle"](written) == []


def test_private_modules_are_for_their_own_package(tmp_path: Path) -> None:
    sources = {
        "a": "from .b import _c",
        "b__d": "from . import _c",
        "b___c": "",
        "e__f": "from ..b._c import C\nfrom ..b import d",
    }
    assert CHECKS["private"](package(tmp_path, **sources)) == [
        "migrate.a imports migrate.b._c",
        "migrate.e.f imports migrate.b._c",
    ]


@pytest.mark.parametrize(
    ("returned", "count"),
    [("dict[str, Any]", 1), ("dict[str, Any] | None", 1), ("Answer", 0), ("dict[str, Tensor]", 0)],
)
def test_a_public_function_that_answers_with_a_bare_dict_is_found(
    tmp_path: Path, returned: str, count: int
) -> None:
    written = package(tmp_path, api=f"def verb() -> {returned}: ...\ndef _other() -> dict: ...")
    (tmp_path / "migrate" / "__init__.py").write_text('_HOMES = {"verb": "api"}\n')
    written["migrate"] = Module(tmp_path, tmp_path / "migrate" / "__init__.py")
    assert len(CHECKS["dict"](written)) == count


@pytest.mark.parametrize(
    "body",
    [
        "found: int",
        "def __init__(self, made): ...",
        "def f(self):\n        self.held = 1",
        "def look(self, *, there=1): ...",
        "held = 1",
    ],
)
def test_an_empty_word_is_found(tmp_path: Path, body: str) -> None:
    assert len(CHECKS["word"](package(tmp_path, a=f"class A:\n    {body}\n"))) == 1
    assert CHECKS["word"](package(tmp_path, a=f"class _A:\n    {body}\n")) == []
    assert (
        CHECKS["word"](
            package(
                tmp_path,
                a="class A:\n    key: int\n    def f(self):\n        found = 1\n",
            )
        )
        == []
    )
