"""What files made of two checkpoints say of themselves where the pair alone does not decide: lone
numbers, halves that change places, rules that take what they make.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from commandline import run
from safetensors.numpy import save_file

import migrate
from migrate.lints.fixing import fixed

Arrays = dict[str, np.ndarray]


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype("f4")


def made(folder: Path, old: Arrays, new: Arrays, config: Mapping[str, object] | None = None) -> str:
    """The text of the file that is made of both, which passes lint and its tests."""
    for name, side in (("old", old), ("new", new)):
        (folder / name).mkdir()
        held = {key: np.ascontiguousarray(array) for key, array in side.items()}
        save_file(held, folder / name / "model.safetensors")
    if config is not None:
        (folder / "old" / "config.json").write_text(json.dumps(config))
    file = folder / "made.yaml"
    migrate.new(file, from_diff=(folder / "old", folder / "new"))
    assert migrate.lint([file]).diagnostics == ()
    assert migrate.test(file).passed
    return file.read_text()


LONE = "# 0 may count or be a name: no other number is in its place\n"


@pytest.mark.parametrize("target", ["layer.w", "net.1.w"])
def test_the_number_of_a_single_layer_that_goes_is_marked(target: str, tmp_path: Path) -> None:
    old = {"layers.0.w": weight(3, 4), "norm": weight(3)}
    text = made(tmp_path, old, {target: old["layers.0.w"], "norm": old["norm"]}, {"num_layers": 1})
    assert f"  {LONE}" in text
    assert "from: layers.0.w\n" in text
    assert "params" not in text


def test_one_that_is_joined_is_marked_too_and_makes_no_param(tmp_path: Path) -> None:
    old = {"layers.0.w": weight(3, 4), "norm": weight(3)}
    new = {"layers.w": old["layers.0.w"][None], "norm": old["norm"]}
    text = made(tmp_path, old, new, {"num_layers": 1, "groups": 1})
    assert LONE in text
    assert "params" not in text
    assert "$" not in text.replace("$schema", "")


def test_one_that_follows_into_the_new_key_counts_and_is_not_marked(tmp_path: Path) -> None:
    old = {f"model.layers.0.{w}": weight(3, 4, seed=n) for n, w in enumerate("qk")}
    new = {f"h.0.attn.{w}": old[f"model.layers.0.{w}"] for w in "qk"}
    text = made(tmp_path, old, new, {"num_layers": 1})
    assert "model.layers.{n:int}" in text
    assert "may count" not in text


def test_one_beside_which_there_are_others_is_not_marked(tmp_path: Path) -> None:
    old = {f"mlp.{n}.w": weight(3, 4, seed=n) for n in (0, 2)} | {"norm": weight(3)}
    new = {"fc.w": old["mlp.0.w"], "mlp.2.w": old["mlp.2.w"], "norm": old["norm"]}
    text = made(tmp_path, old, new)
    assert "from: mlp.0.w" in text
    assert "may count" not in text


def test_a_number_with_two_names_stays_and_both_are_named(tmp_path: Path) -> None:
    experts = [weight(3, 4, seed=e) for e in range(4)]
    old = {f"layers.0.experts.{e}.w": one for e, one in enumerate(experts)}
    new = {"layers.0.experts.w": np.stack(experts)}
    text = made(tmp_path, old, new, {"num_experts": 4, "num_heads": 4, "num_layers": 1})
    assert "# 4 is num_experts and num_heads in config.json\n" in text
    assert "count: 4}" in text
    assert "params" not in text


@pytest.mark.parametrize(
    ("shape", "axis"), [((8,), 0), ((3, 8), 1), ((4096, 6), 0), ((2, 5), 0), ((6, 5), 0)]
)
def test_halves_that_change_places_are_said_so_whatever_the_length(
    shape: tuple[int, ...], axis: int, tmp_path: Path
) -> None:
    old = {"a.w": weight(*shape)}
    text = made(tmp_path, old, {"b.w": np.roll(old["a.w"], shape[axis] // 2, axis)})
    assert "flip" in text
    assert "shift" not in text
    assert len(text) < 1500
    # a larger model
    longer = tuple(2 * n for n in shape)
    other = {"a.w": weight(*longer, seed=1)}
    if shape[axis] == 2:
        return
    migrate.apply(other, tmp_path / "x.safetensors", rules=[tmp_path / "made.yaml"])
    from safetensors.numpy import load_file

    wanted = np.roll(other["a.w"], longer[axis] // 2, axis)
    assert np.array_equal(load_file(tmp_path / "x.safetensors")["b.w"], wanted)


SQUARE = weight(4, 4)
AGAIN = {
    "transposed": ({"w": SQUARE}, {"w": SQUARE.T}),
    "rolled": ({"w": SQUARE}, {"w": np.roll(SQUARE, 1, 0)}),
    "exchanged": ({"a": SQUARE, "b": SQUARE + 1}, {"a": SQUARE + 1, "b": SQUARE}),
    "counted on": (
        {f"l.{n}.w": SQUARE + n for n in range(3)},
        {f"l.{n + 1}.w": SQUARE + n for n in range(3)},
    ),
}


@pytest.mark.parametrize("case", AGAIN)
def test_rules_that_take_what_they_make_say_so(case: str, tmp_path: Path) -> None:
    text = made(tmp_path, *AGAIN[case])
    (line,) = [one for one in text.splitlines() if "allow M709 because" in one]
    assert len(line) <= 140
    file = tmp_path / "made.yaml"
    told = run("test", file)
    assert told.exit == 0
    assert "the file allows M709" in run("test", file, "-v").out + told.out
    # without the comment, or without a reason in it, the check fails
    for without in (text.replace(f"{line}\n", ""), text.replace(line, "# migrate: allow M709")):
        file.write_text(without)
        assert migrate.test(file).passed is False
    # text is no comment
    file.write_text(without.replace("title: Made", f'title: "{line}"'))
    assert migrate.test(file).passed is False


def test_other_rules_do_not_say_so(tmp_path: Path) -> None:
    assert "M709" not in made(tmp_path, {"a": SQUARE}, {"b": SQUARE.T})


def test_a_lineage_needs_no_such_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"w": SQUARE}, "old.safetensors")
    save_file({"w": np.ascontiguousarray(SQUARE.T)}, "new.safetensors")
    migrate.new("toy/v2/turn", from_diff=("old.safetensors", "new.safetensors"))
    assert "M709" not in Path("rules/toy/v2/turn.yaml").read_text()


def test_what_is_kept_stands_as_lint_would_sort_it(tmp_path: Path) -> None:
    names = ("z", "model.b.{x}", "_a", "Zed", "m.0.w", "m.1.w", "n.0.bias", 'q"')
    old = {name: weight(2, 3, seed=n) for n, name in enumerate(names)} | {"old": weight(5)}
    new = {**{name: old[name] for name in names}, "new": old["old"]}
    text = made(tmp_path, old, new)
    assert text.count("\n  - ") > 3
    assert fixed(text, tmp_path / "made.yaml") == (text, [])
    index = tmp_path / "index.yaml"
    migrate.new(index, index=tmp_path / "old")
    again, said = fixed(index.read_text(), index)
    assert (again, said) == (index.read_text(), [])
