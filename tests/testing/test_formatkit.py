"""Every format that is written satisfies the kit, and so does the one that the docs show; and the
kit notices what is wrong with one.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from migrate import formats
from migrate.core.errors import fail
from migrate.formats.base import Placed
from migrate.testing import formatkit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "custom-format.md"


@contextmanager
def installed(made: Any, name: str = "flat") -> Iterator[None]:
    """The format stands in the registry, as if a package declared it."""
    registry = formats.FORMATS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_entries", {name: None})
        patch.setattr(registry, "_loaded", {**registry._loaded, name: made})
        yield


def shown() -> Any:
    """The module that the page shows, and what its test is."""
    code, test = re.findall(r"`[a-z_]+\.py`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[
        :2
    ]
    module = types.ModuleType("acme_formats_shown")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module, test


FLAT = shown()[0].Flat


@pytest.mark.parametrize(("name", "number"), formatkit.cases())
def test_a_built_in_format_is_read_as_it_was_written(
    name: str, number: int, tmp_path: Path
) -> None:
    formatkit.check_sample(name, number, tmp_path)


@pytest.mark.parametrize("name", ["safetensors", "torchzip", "dcp"])
def test_a_built_in_format_is_described(name: str) -> None:
    formatkit.check_description(name)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["safetensors", "torchzip", "dcp"])
def test_a_built_in_format_refuses_what_is_broken(name: str, tmp_path: Path) -> None:
    assert formatkit.check_broken(name, tmp_path) > formatkit.MUTANTS // 2


def test_the_format_that_the_docs_show_passes_as_its_test_there_says(tmp_path: Path) -> None:
    module, text = shown()
    with installed(module.FORMAT):
        tests: dict[str, Any] = {}
        exec(compile(text, str(PAGE), "exec"), tests)
        tests["test_description"]()
        for name, number in formatkit.cases(["flat"]):
            folder = tmp_path / str(number)
            folder.mkdir()
            tests["test_samples"](name, number, folder)
        tests["test_broken_files"](tmp_path)
        assert ("flat", 0) in formatkit.cases()


class Renamed(FLAT):
    name = "other"


class Taking(FLAT):
    suffixes = (".safetensors",)


class Mute(FLAT):
    sniff = None


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Renamed, "flat calls itself 'other'"),
        (Taking, "files that end in .safetensors are ['safetensors']'s"),
        (Mute, "flat has no `sniff`"),
    ],
)
def test_what_is_wrong_with_a_description_is_noticed(kind: Any, says: str) -> None:
    with installed(kind()), pytest.raises(AssertionError) as caught:
        formatkit.check_description("flat")
    assert says in str(caught.value)


class Changed(FLAT):
    """What is described is changed by `change`, a file at a time."""

    def describe(self, specs: Any, **asked: Any) -> Any:
        target = super().describe(specs, **asked)
        return replace(target, files=tuple(map(self.change, target.files)))


class WithHole(Changed):
    def change(self, file: Any) -> Any:
        moved = tuple(p._replace(offset=p.offset + 8) for p in file.tensors)
        return replace(file, tensors=moved, size=file.size + 8)


class Short(Changed):
    def change(self, file: Any) -> Any:
        return replace(file, size=file.size - 1)


class Twice(Changed):
    def change(self, file: Any) -> Any:
        more = Placed(file.tensors[0].key, file.size, file.tensors[0].nbytes)
        return replace(file, tensors=(*file.tensors, more), size=file.size + more.nbytes)


class Forgetful(FLAT):
    """The stamp is lost."""

    def describe(self, specs: Any, *, stamp: Any, **asked: Any) -> Any:
        return super().describe(specs, stamp=None, **asked)


class Neither(FLAT):
    def describe(self, specs: Any, **asked: Any) -> Any:
        fail("M916", "no")


class Otherwise(FLAT):
    """It says M906 where it has no folders."""

    def describe(self, specs: Any, *, folder: bool, **asked: Any) -> Any:
        if folder:
            fail("M906", "no")
        return super().describe(specs, folder=folder, **asked)


class Growing(FLAT):
    """Each time it is asked it makes another header."""

    times = 0

    def describe(self, specs: Any, *, metadata: Any, stamp: Any, **asked: Any) -> Any:
        self.times += 1
        return super().describe(
            specs, metadata=metadata, stamp=(stamp or "") + str(self.times), **asked
        )


class OtherDtype(FLAT):
    """What is read is of another dtype."""

    def read(self, place: Any, blob: Any) -> Any:
        source = super().read(place, blob)
        held = {
            key: at._replace(spec=replace(at.spec, dtype="float16"))
            for key, at in source.index.tensors.items()
        }
        source.index = replace(source.index, tensors=held)
        return source


class Elsewhere(FLAT):
    """Tensors are read from the place of another one."""

    def read(self, place: Any, blob: Any) -> Any:
        source = super().read(place, blob)
        held = {key: at._replace(offset=at.offset - 1) for key, at in source.index.tensors.items()}
        source.index = replace(source.index, tensors=held)
        return source


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (WithHole, "w is at "),
        (Short, "and its tensors end at"),
        (Twice, "of w are not placed once"),
        (Forgetful, "the stamp comes back as None"),
        (Neither, "neither as one file nor as a folder"),
        (Otherwise, "a form that it has not is refused as {'M906'}"),
        (Growing, "described twice, it is another one"),
        (OtherDtype, "w: float16 [2, 3] instead of float32 [2, 3]"),
        (Elsewhere, "w has other bytes"),
    ],
)
def test_what_is_wrong_with_what_it_writes_is_noticed(kind: Any, says: str, tmp_path: Path) -> None:
    with installed(kind()), pytest.raises(AssertionError) as caught:
        formatkit.check_sample("flat", 1, tmp_path)
    assert says in str(caught.value)


class Trusting(FLAT):
    """What the header says is believed."""

    def read(self, place: Any, blob: Any) -> Any:
        import json

        from migrate.core.spec import spec
        from migrate.formats.base import FileSource, Index, Stored

        length = int.from_bytes(blob.read(8, 8), "little")
        header = json.loads(blob.read(16, length))
        tensors = {
            key: Stored(spec(dtype, shape), 0, 16 + length + offset)
            for key, (dtype, shape, offset) in header["tensors"].items()
        }
        release = place.folder.close
        return FileSource(
            place.path, self.name, Index(tensors, (blob.name,)), [blob], release=release
        )


def test_a_reader_that_believes_its_file_is_noticed(tmp_path: Path) -> None:
    with installed(Trusting()), pytest.raises(AssertionError) as caught:
        formatkit.check_broken("flat", tmp_path)
    assert re.search(r" ends in [A-Za-z]+Error| lies at ", str(caught.value))
