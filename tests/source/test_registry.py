"""Built-ins by file name, third parties by entry point, and nobody harmed by a broken one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from migrate import formats, ops
from migrate.ops import base
from migrate.ops.base import Op
from migrate.source.registry import Broken, BrokenEntryError, Registry
from migrate.testing import opkit

FAKE = Path(__file__).parent.parent / "fake_dist"


@pytest.fixture
def registry() -> Registry[Op]:
    return Registry("migrate.ops", "migrate.ops", "OP")


@pytest.fixture
def third_party(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKE))
    yield
    for name in [m for m in sys.modules if m.startswith("acme_ops")]:
        del sys.modules[name]


def test_a_builtin_is_found_without_scanning_entry_points(registry, monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: pytest.fail("scanned"))
    assert registry.get("stack") is ops.get("stack")
    assert "stack" in registry.builtin()


def test_files_with_an_underscore_are_no_entries(registry):
    assert not [n for n in registry.builtin() if n.startswith("_")]
    for name in ("_op", "base"):
        assert name not in registry.builtin()
        with pytest.raises(KeyError):
            registry.get(name)


def test_an_unknown_name_is_a_key_error(registry):
    with pytest.raises(KeyError, match="stakc"):
        registry.get("stakc")


def test_a_package_that_is_not_there_has_no_entries():
    assert Registry("migrate.nothing", "migrate.nothing", "OP").names() == []


def test_a_third_partys_op_is_listed_and_loaded_on_demand(registry, third_party):
    assert {"acme_reverse", "acme_crash", "stack"} <= set(registry.names())
    assert not [m for m in sys.modules if m.startswith("acme_ops")]
    assert registry.get("acme_reverse").summary == "puts the axes in reverse order"


def test_a_broken_entry_says_who_and_why_and_harms_no_other(registry, third_party):
    with pytest.raises(BrokenEntryError) as caught:
        registry.get("acme_crash")
    assert caught.value.broken == Broken(
        "acme_crash", "acme-ops", "RuntimeError: acme needs a licence"
    )
    with pytest.raises(BrokenEntryError, match="acme_absent of acme-ops: AttributeError"):
        registry.get("acme_absent")
    loaded = registry.all()
    assert "acme_reverse" in loaded
    assert "stack" in loaded
    assert "acme_crash" not in loaded
    assert {b.name for b in registry.broken} == {
        "acme_crash",
        "acme_absent",
        "stack",
        "acme_reverse",
    }


def test_a_third_party_replaces_neither_a_builtin_nor_another(registry, third_party):
    registry.names()
    assert registry.get("stack") is ops.get("stack")
    assert registry.get("acme_reverse").name == "acme_reverse"
    assert Broken("stack", "acme-ops", "the name is built in") in registry.broken
    assert Broken("acme_reverse", "zeta-ops", "acme-ops declares the same name") in registry.broken


def test_a_third_party_can_use_the_kit(registry, third_party, monkeypatch):
    monkeypatch.setattr(base, "registry", registry)
    opkit.check_description("acme_reverse")
    for name, number in opkit.cases(["acme_reverse"]):
        opkit.check_sample(name, number)


def test_the_old_path_of_the_contract_of_ops_warns_and_gives_the_same_classes():
    sys.modules.pop("migrate.ops._op", None)
    with pytest.warns(DeprecationWarning, match=r"migrate\.ops\.base") as caught:
        old = importlib.import_module("migrate.ops._op")
    assert len(caught) == 1
    assert (old.Op, old.arg) == (base.Op, base.arg)
    assert old.Step("flip", None).op == "flip"
    assert not hasattr(old, "NoSuchName")


def test_a_format_that_calls_the_tree_rest_is_still_written(monkeypatch):
    class Older:
        name = "older"

        def describe(self, specs, *, folder, rest=None):
            return specs, folder, rest

    class Newer(Older):
        def describe(self, specs, *, folder, tree=None):
            return specs, folder, tree

    loaded = {"older": Older(), "newer": Newer()}
    monkeypatch.setattr(formats.FORMATS, "_loaded", loaded)
    for name, loads in loaded.items():
        assert formats.get(name).describe({}, folder=True, tree="a tree") == ({}, True, "a tree")
        assert formats.get(name).name == loads.name == "older"
