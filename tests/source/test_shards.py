"""How tensors are dealt out to files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.core.spec import spec
from migrate.running.resources import parse_size
from migrate.source.shards import deal, in_natural_order, shard_names, shard_sets


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9), ("5GiB", 5 * 2**30), ("500MB", 5 * 10**8), ("1.1GB", 1_100_000_000),
        ("7", 7), ("12 kb", 12_000),
        ("2tib", 2**41),        ("1.5 MiB", 3 * 2**19), (77, 77), ("1B", 1), ("0.5kb", 500),
    ],
)  # fmt: skip
def test_a_size_is_exact_in_powers_of_1000_or_1024(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "5XB",
        "-5GB",
        "5 G B",
        "1e9",
        "0",
        0,
        -1,
        "0.1",
        "٣GB",
        "5GB5",
        "inf",
        ".5GB",
        "9" * 30,
        1.5,
        True,
        None,
    ],
)
def test_what_is_no_size_says_how_to_write_one(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_order_is_natural_and_total():
    keys = [
        "layers.10.w",
        "layers.2.w",
        "layers.2.b",
        "a",
        "layers.02.w",
        "x100y20",
        "x100y3",
        "b",
        "layers.1",
    ]
    assert in_natural_order(keys) == [
        "a",
        "b",
        "layers.1",
        "layers.2.b",
        "layers.02.w",
        "layers.2.w",
        "layers.10.w",
        "x100y3",
        "x100y20",
    ]


@given(st.lists(st.text("a.01٣", max_size=6), unique=True))
def test_order_does_not_depend_on_the_order_given(keys):
    assert in_natural_order(keys) == in_natural_order(keys[::-1])
    assert sorted(in_natural_order(keys)) == sorted(keys)


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 60))
def test_shards_hold_every_key_once_and_no_more_than_the_limit(sizes, limit):
    specs = {f"k{i}": spec("uint8", (n,)) for i, n in enumerate(sizes)}
    shards = deal(list(specs), specs, limit)
    assert sorted(k for s in shards for k in s) == sorted(specs)
    assert len(shards) >= 1
    assert len(shards) == 1 or all(shards)
    for shard in shards:
        assert len(shard) == 1 or sum(specs[k].nbytes for k in shard) <= limit


def test_names_are_the_hub_s():
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_sets_of_numbered_files_say_what_is_absent_and_what_is_too_many():
    (found,) = shard_sets(
        ["m-00002-of-00003.safetensors", "m-00004-of-00003.safetensors", "other.safetensors"]
    )
    assert found.title == "m-*-of-00003.safetensors"
    assert found.absent == ("m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors")
    assert found.beyond == ("m-00004-of-00003.safetensors",)
    assert (
        shard_sets(["m-000000001-of-999999999.safetensors", "m-00001-of-000003.safetensors"]) == []
    )
