"""Which format opens what."""

import pytest
import torch
from safetensors.torch import save_file

from migrate import formats
from migrate.core.errors import CheckpointError, QuestionError


def test_every_module_of_the_package_is_a_format_or_says_that_it_is_none():
    for name in formats.FORMATS.builtin():
        found = formats.FORMATS.get(name)
        assert found is None or found.name
        if found is not None:
            assert formats.get(found.name) is found
    assert formats.get("safetensors").name == "safetensors"
    with pytest.raises(KeyError):
        formats.get("memory")
    with pytest.raises(KeyError):
        formats.get("nonsense")


def test_the_surest_format_opens_and_no_other_tries_after_it(tmp_path, monkeypatch):
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    asked = []

    class Other:
        def __init__(self, name, sure):
            self.name, self.sure = name, sure

        def sniff(self, place):
            asked.append((self.name, place.names))
            return self.sure

        def open(self, place):
            raise CheckpointError([])

    known = {"a": Other("a", 1), "b": Other("b", 3), "c": None, "safetensors": formats.get("safetensors")}
    monkeypatch.setattr(formats.FORMATS, "builtin", lambda: tuple(known))
    monkeypatch.setattr(formats.FORMATS, "get", known.__getitem__)
    with pytest.raises(CheckpointError):
        formats.open(tmp_path)
    assert asked == [("a", ("model.safetensors",)), ("b", ("model.safetensors",))]
    known["b"].sure = 0
    formats.open(tmp_path).close()


def test_a_format_of_a_third_party_opens_what_no_built_in_knows(tmp_path, monkeypatch):
    (tmp_path / "model.acme").write_text("acme")

    class Acme:
        name = "acme"

        def sniff(self, place):
            return int(place.head(4) == b"acme")

        def open(self, place):
            place.close()
            return self

    acme, builtin, get = Acme(), formats.FORMATS.builtin(), formats.FORMATS.get
    monkeypatch.setattr(formats.FORMATS, "names", lambda: [*builtin, "acme"])
    monkeypatch.setattr(formats.FORMATS, "get", lambda name: acme if name == "acme" else get(name))
    assert formats.open(tmp_path / "model.acme") is acme
    (tmp_path / "model.acme").write_text("else")
    with pytest.raises(QuestionError, match="starts with 'else'"):
        formats.open(tmp_path / "model.acme")
