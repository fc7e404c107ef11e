"""What every codec has to satisfy, for the built-in ones and for those of third parties.

    import pytest
    from migrate.testing import codeckit

    @pytest.mark.parametrize("name, number", codeckit.cases(["my-codec"]))
    def test_my_codec(name, number):
        codeckit.check_sample(name, number)

    def test_my_codec_is_described():
        codeckit.check_description("my-codec")

Each sample is encoded and decoded whole, box by box, from and into arrays with gaps, and once more
by the codec's reference; the bits must be the same each time. Failures are AssertionErrors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from .. import codecs
from ..codecs.base import Codec, OpError, Options
from ..core.spec import Spec
from ..elements.raw import carrier
from .opkit import require

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Box

    Array = np.ndarray[Any, Any]

# what numbers may become; a codec refuses those it does not decode to
DECODED = ("float32", "bfloat16", "float16")


def cases(names: Iterable[str] | None = None) -> list[tuple[str, int]]:
    """(name, number of the sample) for parametrize, of the codecs `names`, by default all."""
    chosen = codecs.names() if names is None else list(names)
    return [
        (name, number) for name in chosen for number, _ in enumerate(codecs.get(name).samples())
    ]


def numbers(spec: Spec, seed: int = 0) -> Array:
    """Raw elements of `spec`, a float dtype: small normal numbers, and among them zeros of both
    signs, subnormals and an outlier.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    made = (rng.standard_normal(spec.shape) * 0.02).astype("f4")
    flat = made.reshape(-1)
    odd = np.array([0.0, -0.0, 1e-40, -3e-8, 1e-4, 30.0], "f4")[: flat.size]
    flat[rng.permutation(flat.size)[: odd.size]] = odd
    if len(spec.shape) > 1:
        made[..., : spec.shape[-2] // 3, : spec.shape[-1] // 2] = 0
    if spec.dtype == "bfloat16":
        return (made.view("<u4") >> 16).astype("<u2")
    kind = {"float32": "<f4", "float16": "<f2"}[spec.dtype]
    return made.astype(kind).view(carrier(spec.dtype))


def encoded(codec: Codec, options: Options, array: Array, spec: Spec) -> list[Array]:
    """All parts of a tensor."""
    import numpy as np

    out = []
    for number, part in enumerate(codec.encoded(options, spec)):
        whole = _whole(part)
        made = np.empty(part.shape, carrier(part.dtype))
        codec.encode(
            options,
            _cut(array, codec.encode_needs(options, spec, number, whole)),
            spec,
            number,
            whole,
            made,
        )
        out.append(made)
    return out


def decoded(
    codec: Codec, options: Options, parts: Sequence[Array], specs: Sequence[Spec], dtype: str
) -> Array:
    """All numbers of a tensor."""
    import numpy as np

    spec = codec.decoded(options, specs, dtype)
    made = np.empty(spec.shape, carrier(dtype))
    codec.decode(options, parts, specs, dtype, _whole(spec), made)
    return made


def check_sample(name: str, number: int) -> None:
    """Everything that must hold for sample `number` of the codec called `name`."""
    codec = codecs.get(name)
    options, spec = list(codec.samples())[number]
    codec.validate(options, True)
    codec.validate(options, False)
    array = numbers(spec, number)
    check_encoding(codec, options, array, spec)
    specs = codec.encoded(options, spec)
    parts = encoded(codec, options, array, spec)
    for dtype in DECODED:
        try:
            codec.decoded(options, specs, dtype)
        except OpError:
            continue
        check_decoding(codec, options, parts, specs, dtype)


def check_encoding(codec: Codec, options: Options, array: Array, spec: Spec) -> None:
    """The parts are those of the reference, whole and box by box."""
    import numpy as np

    specs, made = codec.encoded(options, spec), encoded(codec, options, array, spec)
    label = f"{codec.name} {options} of {spec}"
    require(
        len(specs) == len(codec.parts), f"{label}: {len(specs)} parts, the codec has {codec.parts}"
    )
    wanted = codec.reference_parts(options, array, spec)
    for number, (part, one, other) in enumerate(zip(specs, made, wanted, strict=True)):
        role = codec.parts[number]
        _same(f"{label}: {role}", one, other)
        for box in boxes(part, codec.grain(options, spec, number)):
            needed = codec.encode_needs(options, spec, number, box)
            out = _with_gaps(tuple(high - low for low, high in box), one.dtype)
            codec.encode(options, _with_gaps_of(_cut(array, needed)), spec, number, box, out)
            _same(
                f"{label}: {role} in {box}",
                np.ascontiguousarray(out),
                np.ascontiguousarray(_cut(one, box)),
            )


def check_decoding(
    codec: Codec, options: Options, parts: Sequence[Array], specs: Sequence[Spec], dtype: str
) -> None:
    """The numbers are those of the reference, whole and box by box."""
    import numpy as np

    spec = codec.decoded(options, specs, dtype)
    made = decoded(codec, options, parts, specs, dtype)
    label = f"{codec.name} {options} of {[str(s) for s in specs]} to {dtype}"
    _same(label, made, codec.reference(options, parts, specs, dtype))
    for box in boxes(spec, codec.grain(options, spec, None)):
        needed = codec.decode_needs(options, specs, box)
        out = _with_gaps(tuple(high - low for low, high in box), made.dtype)
        codec.decode(
            options,
            [_with_gaps_of(_cut(a, b)) for a, b in zip(parts, needed, strict=True)],
            specs,
            dtype,
            box,
            out,
        )
        _same(f"{label} in {box}", np.ascontiguousarray(out), np.ascontiguousarray(_cut(made, box)))


def check_description(name: str) -> None:
    """The codec is called as in its registry, says what it does, and names parts and bound."""
    codec = codecs.get(name)
    require(isinstance(codec, Codec), f"{name} is {codec!r}, not a Codec")
    require(codec.name == name, f"{name} calls itself {codec.name}")
    require(bool(codec.summary.strip()), f"{name} has no summary")
    require(
        bool(codec.parts) and len(set(codec.parts)) == len(codec.parts),
        f"{name} has the parts {codec.parts}",
    )
    require(bool(codec.leaves), f"{name} does not say how its parts are called on disk")
    for leaves in codec.leaves:
        odd = set(leaves.by_role) - set(codec.parts)
        require(not odd, f"{name}: {leaves.producer} has roles that are no parts: {sorted(odd)}")
    samples = list(codec.samples())
    require(bool(samples), f"{name} has no samples")
    for options, spec in samples:
        require(
            bool(codec.bound(options).strip()),
            f"{name} does not say how large the error of {options} is",
        )
        require(
            len(codec.encoded(options, spec)) == len(codec.parts),
            f"{name}: {options} makes other parts than {codec.parts}",
        )
        for odd_options in (
            replace(options, like="nobody"),
            replace(options, scale="nothing"),
            replace(options, non_finite="whatever"),
        ):
            try:
                codec.validate(odd_options, True)
            except OpError as error:
                require(error.code == "M308", f"{name}: {odd_options} is refused as {error.code}")
            else:
                raise AssertionError(f"{name} takes {odd_options}")


def boxes(spec: Spec, grain: Sequence[int]) -> Iterator[Box]:
    """Boxes of a tensor: parts of its middle, corners, one element, and one cut at the grain."""
    shape = spec.shape
    if not prod(shape):
        return
    yield tuple((n // 3, max(n // 3 + 1, n - n // 4)) for n in shape)
    yield tuple((0, max(1, n // 2)) for n in shape)
    yield tuple((n - 1, n) for n in shape)
    yield tuple(
        ((n // 2) // g * g, min(n, (n // 2) // g * g + g))
        for n, g in zip(shape, grain, strict=True)
    )


def _whole(spec: Spec) -> Box:
    return tuple((0, n) for n in spec.shape)


def _cut(array: Array, box: Box) -> Array:
    return array[tuple(slice(low, high) for low, high in box)]


def _with_gaps(shape: tuple[int, ...], dtype: Any) -> Array:
    """Room whose rows do not lie side by side."""
    import numpy as np

    return np.empty((*shape[:-1], shape[-1] + 3), dtype)[..., : shape[-1]]


def _with_gaps_of(array: Array) -> Array:
    out = _with_gaps(array.shape, array.dtype)
    out[...] = array
    return out


def _same(label: str, one: Array, other: Array) -> None:
    require(one.shape == other.shape, f"{label}: {one.shape} instead of {other.shape}")
    require(one.dtype == other.dtype, f"{label}: {one.dtype} instead of {other.dtype}")
    if one.tobytes() != other.tobytes():
        import numpy as np

        at = tuple(int(i) for i in np.argwhere(one != other)[0])
        raise AssertionError(f"{label}: at {at} {one[at]:#x} instead of {other[at]:#x}")
