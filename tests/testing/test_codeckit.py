"""Every codec satisfies the kit, over 0 to 4 axes; and the kit notices what is wrong with one."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import acme_codecs
import numpy as np
import pytest

from migrate import codecs
from migrate.codecs.base import OpError, arg, dataclass
from migrate.core.spec import Spec
from migrate.testing import codeckit

ACME = (acme_codecs.Ints, acme_codecs.PerTensor, acme_codecs.Table)


@pytest.fixture(scope="module", autouse=True)
def third_parties():
    with acme_codecs.installed(*(kind() for kind in ACME)):
        yield


NAMES = [*codecs.names(), *(kind.name for kind in ACME)]


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_is_described(name: str) -> None:
    codeckit.check_description(name)


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_codec_takes_or_refuses_numbers_of_any_number_of_axes(name: str, seed: int) -> None:
    taken = codeckit.check_axes(name, seed)
    assert (taken > 0) == codecs.get(name).encodes


def test_one_whose_scale_has_no_axes_takes_all_of_them() -> None:
    assert codeckit.check_axes("acme-tensor") == 5


def test_samples_are_cases_and_so_is_what_is_stored() -> None:
    assert len(codeckit.cases(["acme-table"])) == 4
    for kind in ACME:
        check_samples(kind.name)


def check_samples(name: str) -> None:
    for _, number in codeckit.cases([name]):
        codeckit.check_sample(name, number)


class Unsaid(acme_codecs.Ints):
    name = "acme-unsaid"

    @dataclass(frozen=True, slots=True)
    class Args:
        bits: int = 8


class Own(acme_codecs.Ints):
    name = "acme-own"

    @dataclass(frozen=True, slots=True)
    class Args:
        dtype: str = arg("a word that the op has", default="x")


class Loose(acme_codecs.Ints):
    name = "acme-loose"

    def validate(self, args, encoding):
        pass


class Strange(acme_codecs.Ints):
    name = "acme-strange"
    optional = ("zero", "shape", "colour")


class First(acme_codecs.Ints):
    name = "acme-first"
    optional = ("weight",)


class Silent(acme_codecs.Table):
    name = "acme-silent"

    def stored(self):
        return ()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Unsaid, "`bits` has no description"),
        (Own, "`dtype` is what `dequantize` and `quantize` take"),
        (Loose, "acme-loose takes"),
        (Strange, "`optional` has roles that are no parts: ['colour']"),
        (First, "the first part is not optional"),
        (Silent, "acme-silent has nothing to decode"),
    ],
)
def test_what_is_wrong_with_a_description_is_noticed(kind, says: str) -> None:
    with acme_codecs.installed(kind()), pytest.raises(AssertionError) as caught:
        codeckit.check_description(kind.name)
    assert says in str(caught.value)


class Boxless(acme_codecs.Table):
    """A box begins where the tensor does."""

    name = "acme-boxless"

    def decode_needs(self, args, specs, box):
        return [tuple((0, high - low) for low, high in box), ((0, 256),)]


class Second(acme_codecs.Table):
    """The reference says something else."""

    name = "acme-second"

    def reference(self, args, arrays, specs, dtype):
        return np.asarray(super().reference(args, arrays, specs, dtype) ^ 1)


class Careless(acme_codecs.Table):
    """A table of another rank ends in numpy's error."""

    name = "acme-careless"

    def decoded(self, args, specs, dtype):
        if dtype != "float32" or specs[1].shape[0] != 256:
            raise OpError("M303", "no")
        return Spec(dtype, specs[0].shape)


class Rows(acme_codecs.Table):
    """Two rows are not made of two rows."""

    name = "acme-rows"

    def reference_rows(self, args, specs):
        return 1

    def decode_needs(self, args, specs, box):
        return [((0, specs[0].shape[0]), *box[1:]) if box else (), ((0, 256),)]

    def decode(self, args, arrays, specs, dtype, box, out, meter=None):
        rows = np.asarray(arrays[0])
        rows = rows[slice(*box[0])] if box else rows
        np.asarray(out)[...] = np.asarray(arrays[1])[rows]


class Extra(acme_codecs.PerTensor):
    """The reference makes no scale."""

    name = "acme-extra"

    def encode(self, args, array, of, part, box, out, meter=None, memo=None):
        made = super().reference_parts(args, array, of)[part]
        out[...] = made[(*(slice(a, b) for a, b in box), ...)]

    def reference_parts(self, args, array, of):
        return [super().reference_parts(args, array, of)[0], None]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Boxless, " in "),
        (Second, "instead of"),
        (Careless, "ends in IndexError"),
        (Rows, "rows (1, 2)"),
        (Extra, "the reference makes no scale"),
    ],
)
def test_what_is_wrong_with_its_arithmetic_is_noticed(kind, says: str) -> None:
    with acme_codecs.installed(kind()), pytest.raises(AssertionError) as caught:
        check_samples(kind.name)
    assert says in str(caught.value)


def test_the_codec_that_the_docs_show_passes_as_its_test_there_says() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "codecs.md"
    code, test = re.findall(r"`[a-z_]+\.py`:\n\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    shown = types.ModuleType("acme_shown")
    sys.modules[shown.__name__] = shown
    try:
        exec(compile(code, str(page), "exec"), shown.__dict__)
        with acme_codecs.installed(shown.CODEC):
            tests: dict[str, Any] = {}
            exec(compile(test, str(page), "exec"), tests)
            for name, number in codeckit.cases([shown.CODEC.name]):
                tests["test_samples"](name, number)
            tests["test_description_and_numbers_of_0_to_4_axes"]()
    finally:
        del sys.modules[shown.__name__]
