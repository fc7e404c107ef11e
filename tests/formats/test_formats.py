"""Which format opens what."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

from migrate import formats
from migrate.core.errors import CheckpointError, QuestionError
from migrate.formats.torchzip import FORMAT


def test_every_module_of_the_package_is_a_format_or_says_that_it_is_none():
    for name in formats.FORMATS.builtin():
        found = formats.FORMATS.get(name)
        assert found is None or found.name
        if found is not None:
            # Megatron's parts are files of torch.save, and are written as these are
            assert formats.get(found.name) is (FORMAT if name == "parts" else found)
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

    known = {
        "a": Other("a", 1),
        "b": Other("b", 3),
        "c": None,
        "safetensors": formats.get("safetensors"),
    }
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
            return opened

    opened = SimpleNamespace(format="acme", index=SimpleNamespace(files=(), tensors={}))
    acme, builtin, get = Acme(), formats.FORMATS.builtin(), formats.FORMATS.get
    monkeypatch.setattr(formats.FORMATS, "names", lambda: [*builtin, "acme"])
    monkeypatch.setattr(formats.FORMATS, "get", lambda name: acme if name == "acme" else get(name))
    assert formats.open(tmp_path / "model.acme") is opened
    (tmp_path / "model.acme").write_text("else")
    with pytest.raises(QuestionError, match="starts with 'else'"):
        formats.open(tmp_path / "model.acme")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
class TestFoldersOfDistributedCheckpoints:
    """As torch.distributed.checkpoint writes them, and as Megatron puts `common.pt` beside."""

    @pytest.fixture
    def folder(self, tmp_path):
        torch.distributed.checkpoint.save(
            {"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "iter_0000010"
        )
        return tmp_path / "iter_0000010"

    def refused(self, path):
        with pytest.raises(CheckpointError) as caught:
            formats.open(path)
        (found,) = caught.value.diagnostics
        return found.code, found.render()

    def test_are_read_whatever_files_of_torch_save_lie_beside(self, folder):
        torch.save({"args": {"w": torch.ones(1)}, "iteration": 10}, folder / "common.pt")
        for path in (folder, folder / ".metadata"):
            with formats.open(path) as source:
                assert (source.format, list(source.index.tensors)) == ("dcp", ["w"])
                assert source.index.left_out == ("common.pt",)

    def test_and_safetensors_at_once_are_two_checkpoints(self, folder):
        save_file({"x": torch.ones(1)}, folder / "model.safetensors")
        code, said = self.refused(folder)
        assert code == "M915"
        for path in (folder / ".metadata", folder / "model.safetensors"):
            assert str(path) in said
        with formats.open(folder / ".metadata") as source:
            assert list(source.index.tensors) == ["w"]
        with formats.open(folder / "model.safetensors") as source:
            assert list(source.index.tensors) == ["x"]

    def test_are_more_than_one_of_their_data_files(self, folder):
        code, said = self.refused(folder / "__0_0.distcp")
        assert (code, "a part of the distributed checkpoint in" in said) == ("M937", True)

    def test_without_metadata_are_incomplete(self, folder):
        (folder / ".metadata").unlink()
        torch.save({"iteration": 10}, folder / "common.pt")
        for path in (folder, folder / "__0_0.distcp"):
            code, said = self.refused(path)
            assert (code, "without their `.metadata`" in said) == ("M937", True)
        # left over beside a checkpoint of another format
        save_file({"x": torch.ones(1)}, folder / "model.safetensors")
        with formats.open(folder) as source:
            assert source.index.left_out == ("__0_0.distcp", "common.pt")
