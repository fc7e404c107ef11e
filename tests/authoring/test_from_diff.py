"""`migrate new --from-diff` from files to a rule file that does the same to other weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from commandline import run
from raw_states import opened
from safetensors.numpy import load_file, save_file

import migrate
from migrate.authoring.from_diff import UndecidedError
from migrate.authoring.infer import infer
from migrate.authoring.infer.names import Question

Arrays = dict[str, np.ndarray]


def old_weights(seed: int) -> Arrays:
    dice = np.random.default_rng(seed)
    out = {"model.embed.weight": dice.standard_normal((40, 16)).astype("f4")}
    for n in range(2):
        for w in ("q", "k", "v"):
            out[f"model.layers.{n}.attn.{w}.weight"] = dice.standard_normal((16, 16)).astype("f4")
        for e in range(3):
            for w in ("up", "gate"):
                key = f"model.layers.{n}.experts.{e}.{w}.weight"
                out[key] = dice.standard_normal((8, 16)).astype("f4")
    return out


def new_weights(old: Mapping[str, np.ndarray]) -> Arrays:
    out = {"tok.weight": old["model.embed.weight"]}
    for n in range(2):
        layer = f"model.layers.{n}"
        out[f"blocks.{n}.qkv"] = np.concatenate([old[f"{layer}.attn.{w}.weight"] for w in "qkv"])
        both = [
            np.concatenate([old[f"{layer}.experts.{e}.{w}.weight"] for w in ("gate", "up")])
            for e in range(3)
        ]
        out[f"blocks.{n}.gate_up"] = np.ascontiguousarray(np.stack([one.T for one in both]))
    return out


def test_the_file_does_the_same_to_other_weights(tmp_path: Path) -> None:
    old = old_weights(1)
    save_file(old, tmp_path / "old.safetensors")
    save_file(new_weights(old), tmp_path / "new.safetensors")
    file = tmp_path / "made.yaml"
    pair = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    answer = run("new", "-o", file, "--from-diff", *pair)
    assert answer.exit == 0, answer.err
    assert f"{file}: written, 3 rules, 0 patterns under keep" in answer.out
    other = old_weights(2)
    save_file(other, tmp_path / "other.safetensors")
    made = tmp_path / "made.safetensors"
    assert run("apply", tmp_path / "other.safetensors", "-o", made, "--rules", file).exit == 0
    got, wanted = load_file(made), new_weights(other)
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[key], array) for key, array in wanted.items())


def test_python_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    old = old_weights(1)
    home = tmp_path / "rules"
    migrate.new("toy/v2/made", from_diff=(old, new_weights(old)), rules=home)
    assert migrate.seal(home).lineages[0].state == "sealed"
    assert migrate.seal(home, check=True).exit == 0
    with pytest.raises(UndecidedError):
        migrate.new(tmp_path / "made.yaml", from_diff=(old, {"x": np.arange(7.0)}))
    assert capfd.readouterr() == ("", "")


def test_what_is_not_explained_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    old = old_weights(1)
    new = new_weights(old)
    new["extra"] = np.random.default_rng(9).standard_normal((4, 4)).astype("f4")
    file = tmp_path / "made.yaml"
    with pytest.raises(UndecidedError, match="M994") as caught:
        migrate.new(file, from_diff=(old, new))
    assert caught.value.exit_code == 1
    assert not file.exists()
    report = migrate.new(file, from_diff=(old, new), partial=True)
    assert report.counts.rules == 3
    assert "# Not explained: extra has no elements in common" in file.read_text()


def test_other_weights_are_no_part_of_a_pair(tmp_path: Path) -> None:
    other = {"x": np.random.default_rng(9).standard_normal((4, 4)).astype("f4")}
    with pytest.raises(UndecidedError, match="0% of its bytes") as caught:
        migrate.new(tmp_path / "made.yaml", from_diff=(old_weights(1), other), partial=True)
    assert "same weights" in caught.value.diagnostics[0].help
    assert not (tmp_path / "made.yaml").exists()


def test_that_equal_tensors_kept_their_names_is_a_guess(tmp_path: Path) -> None:
    """They may have changed places, and nobody could tell."""
    flat, dice = np.ones(8, "f4"), np.random.default_rng(9)
    weight = dice.standard_normal((8, 8)).astype("f4")
    old = {"norm1": flat, "norm2": flat, "only": np.zeros(8, "f4"), "a": weight}
    new = {"norm1": flat, "norm2": flat, "only": np.zeros(8, "f4"), "b": weight}
    report = migrate.new(tmp_path / "made.yaml", from_diff=(old, new))
    said = yaml.safe_load((tmp_path / "made.yaml").read_text())
    assert said["guessed"] == ["{w:norm1|norm2}"]
    assert "only" in said["keep"]
    assert [one.code for one in report.diagnostics] == ["M652"]


def test_what_is_partial_names_what_no_rule_takes_and_does_the_rest(tmp_path: Path) -> None:
    dice = np.random.default_rng(9)
    old, new = old_weights(1), new_weights(old_weights(1))
    # one layer differs in an element, and one tensor became another
    new["blocks.1.qkv"][3, 2] += 1
    old["model.scale{0}"] = dice.standard_normal((3, 4)).astype("f4")
    new["extra"] = dice.standard_normal((4, 4)).astype("f4")
    file = tmp_path / "made.yaml"
    with pytest.raises(UndecidedError, match="M994") as caught:
        migrate.new(file, from_diff=(old, new))
    assert any(
        "in 1 of 768 elements, the first at [3, 2]" in n for n in caught.value.diagnostics[0].notes
    )
    assert not file.exists()
    migrate.new(file, from_diff=(old, new), partial=True)
    text = " ".join(line.removeprefix("# ") for line in file.read_text().splitlines())
    assert "Not explained: blocks.1.qkv differs" in text
    assert "Not explained: extra has no elements in common" in text
    assert "No rule takes model.layers.1.attn." in text
    assert "model.scale{0}" in text
    assert migrate.test(file).passed


def test_rules_that_do_not_make_the_new_checkpoint_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.authoring import from_diff

    old = {f"l.{n}.w": 6 * n + np.arange(6, dtype="f4").reshape(2, 3) for n in range(3)}
    new = {f"b.{n}.w": array for n, array in old.items() for n in [n[2]]}
    file = tmp_path / "made.yaml"
    whole = from_diff.compact

    def wrong(*given: object, **options: object) -> object:
        (draft,) = whole(*given, **options)
        return [replace(draft, **change(draft))]

    monkeypatch.setattr(from_diff, "compact", wrong)
    for change, said in (
        (lambda draft: {"via": ({"flip": {"dim": 1}},)}, "do not make b.0.w, b.1.w, b.2.w as"),
        (
            lambda draft: {"targets": draft.targets.replace("b", "c")},
            "do not make b.0.w, b.1.w, b.2.w, c.0.w, c.1.w, c.2.w as",
        ),
        (
            lambda draft: {"sources": draft.sources.replace("l", "m")},
            "cannot be applied to the old checkpoint",
        ),
    ):
        with pytest.raises(UndecidedError, match="M995") as caught:
            migrate.new(file, from_diff=(old, new))
        assert said in str(caught.value)
        assert not file.exists()


def test_keys_that_would_be_those_of_ranks_are_refused_as_by_other_commands(
    tmp_path: Path,
) -> None:
    arrays = {"x.@.y": np.ones((2, 3), "f4"), "..z": np.arange(4, dtype="f4")}
    for name, more in (("plain", {"w": np.zeros(5, "f4")}), ("ranked", {"w@1": np.zeros(5, "f4")})):
        save_file({**arrays, **more}, tmp_path / f"{name}.safetensors")
    plain, ranked = (tmp_path / f"{name}.safetensors" for name in ("plain", "ranked"))
    file = tmp_path / "made.yaml"
    for options in (
        {"from_diff": (plain, ranked)},
        {"from_diff": (ranked, plain)},
        {"index": ranked},
    ):
        with pytest.raises(migrate.MigrateError, match=r"M921.*w@1"):
            migrate.new(file, **options)
        assert not file.exists()


def test_an_answer_of_another_shape_says_so(tmp_path: Path) -> None:
    old, new = {"a": np.ones((4, 4), "f4")}, {"b": np.ones(4, "f4")}
    with pytest.raises(
        migrate.MigrateError, match=r"it is float32 \[4\], and what a new name makes"
    ):
        migrate.new(tmp_path / "made.yaml", from_diff=(old, new), answers={"a": "b"})


def test_questions_come_with_the_error_and_answers_settle_them(tmp_path: Path) -> None:
    ones = np.ones(8, "f4")
    old = {f"l.{i}.{w}_norm": ones for i in range(2) for w in ("input", "post")}
    new = {f"b.{i}.norm{n}": ones for i in range(2) for n in (1, 2)}
    file = tmp_path / "made.yaml"
    with pytest.raises(UndecidedError, match="M993") as caught:
        migrate.new(file, from_diff=(old, new))
    assert [q.target for q in caught.value.questions] == ["b.{n:int}.norm1", "b.{n:int}.norm2"]
    answers = {"l.{n:int}.input_norm": "b.{n}.norm1", "l.{n:int}.post_norm": "b.{n}.norm2"}
    report = migrate.new(file, from_diff=(old, new), answers=answers)
    assert report.counts.guessed == 0


def test_tensors_whose_elements_repeat_get_an_example_of_every_rule(tmp_path: Path) -> None:
    # 300 numbers on thousands of places, as bfloat16 has few for many: no element says where it is
    dice = np.random.default_rng(3)

    def weight(*shape: int) -> np.ndarray:
        return dice.integers(1, 300, shape).astype("u2")

    old: Arrays = {}
    new: Arrays = {}
    for n in range(2):
        parts = {w: weight(rows, 64) for w, rows in (("q", 64), ("k", 16), ("v", 16))}
        old |= {f"l.{n}.{w}.weight": array for w, array in parts.items()}
        new[f"b.{n}.qkv.weight"] = np.concatenate(list(parts.values()))
        pairs = [(weight(48, 64), weight(48, 64)) for _ in range(3)]
        for e, pair in enumerate(pairs):
            old |= {f"l.{n}.e.{e}.{w}": a for w, a in zip(("gate", "up"), pair, strict=True)}
        joined = np.stack([np.concatenate(pair).T for pair in pairs])
        new[f"b.{n}.gate_up"] = np.ascontiguousarray(joined)
        old[f"l.{n}.rope.weight"] = rope = weight(512, 64)
        halves = rope.reshape(4, 2, 64, 64).transpose(0, 2, 1, 3)
        new[f"b.{n}.rope.weight"] = np.ascontiguousarray(halves.reshape(512, 64))
    save_file(old, tmp_path / "old.safetensors")
    save_file(new, tmp_path / "new.safetensors")
    file = tmp_path / "made.yaml"
    report = migrate.new(
        file, from_diff=(tmp_path / "old.safetensors", tmp_path / "new.safetensors")
    )
    assert (report.counts.rules, report.counts.tests) == (3, 1)
    # lint finds no near mistake that the test would not notice
    assert [d.message for d in report.diagnostics] == []
    assert migrate.test(file).passed


def experts(folder: Path, seed: int, count: int, said: Mapping[str, int], new: bool) -> None:
    """A folder of experts, one by one or stacked, with a config.json."""
    dice = np.random.default_rng(seed)
    one = {f"l.{n}.e.{e}.w": dice.standard_normal((8, 6)) for n in range(2) for e in range(count)}
    arrays = {key: array.astype("f4") for key, array in one.items()}
    if new:
        arrays = {
            f"l.{n}.e": np.stack([arrays[f"l.{n}.e.{e}.w"] for e in range(count)]) for n in range(2)
        }
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(said))


def test_a_number_that_the_configuration_has_one_name_for_becomes_a_param(tmp_path: Path) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "made.yaml"
    experts(old, 1, 4, {"num_experts": 4, "hidden_size": 8, "eos_token_id": 4}, new=False)
    experts(new, 1, 4, {"num_experts": 4}, new=True)
    report = migrate.new(file, from_diff=(old, new))
    assert "count: $num_experts" in file.read_text()
    assert (report.counts.rules, migrate.test(file).passed) == (1, True)
    # and holds for a model of another size
    experts(tmp_path / "larger", 2, 6, {"num_experts": 6}, new=False)
    experts(tmp_path / "wanted", 2, 6, {"num_experts": 6}, new=True)
    migrate.apply(tmp_path / "larger", tmp_path / "got", rules=[file])
    got, wanted = (load_file(tmp_path / side / "model.safetensors") for side in ("got", "wanted"))
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[key], array) for key, array in wanted.items())


def test_a_number_of_two_names_stays_and_a_comment_names_them(tmp_path: Path) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "made.yaml"
    experts(old, 1, 4, {"num_experts": 4, "num_heads": 4}, new=False)
    experts(new, 1, 4, {}, new=True)
    migrate.new(file, from_diff=(old, new))
    text = file.read_text()
    assert "count: 4" in text
    assert "# 4 is num_experts and num_heads in config.json" in text


def test_questions_are_asked_one_by_one_and_an_answer_decides_others(tmp_path: Path) -> None:
    ones = np.ones(8, "f4")
    old = {f"l.{i}.{w}_norm": ones for i in range(2) for w in ("input", "post")}
    new = {f"b.{i}.norm{n}": ones for i in range(2) for n in (1, 2)}
    asked = []

    def ask(question: Question) -> int:
        asked.append(question.target)
        return [pattern for pattern, _ in question.candidates].index("l.{n:int}.input_norm")

    file = tmp_path / "made.yaml"
    report = migrate.new(file, from_diff=(old, new), ask=ask)
    assert asked == ["b.{n:int}.norm1"]
    # what a person said is no guess; what is left then was never compared
    assert (report.counts.rules, report.counts.guessed) == (2, 1)
    with pytest.raises(UndecidedError, match="M993"):
        migrate.new(tmp_path / "open.yaml", from_diff=(old, new), ask=lambda question: None)


def marked(file: Path) -> dict[str, bool]:
    """The sources of the rules, and whether names alone decided them."""
    return {
        rule["from"]: rule.get("guessed", False)
        for rule in yaml.safe_load(file.read_text())["rules"]
    }


def test_what_headers_mark_as_guessed_has_no_mark_once_values_were_compared(
    tmp_path: Path,
) -> None:
    dice = np.random.default_rng(3)
    names = {"attn.q": "attention.q", "attn.o": "attention.o", "norm1": "norm_b"}
    old = {f"l.{i}.{w}": dice.standard_normal((8, 8)).astype("f4") for i in range(2) for w in names}
    new = {f"b.{i}.{names[w]}": old[f"l.{i}.{w}"] for i in range(2) for w in names}
    by_headers, by_values = tmp_path / "headers.yaml", tmp_path / "values.yaml"
    answers = {"l.{n:int}.norm1": "b.{n}.norm_b"}
    report = migrate.new(by_headers, from_diff=(old, new), headers=True, answers=answers)
    guessed = {pattern for pattern, mark in marked(by_headers).items() if mark}
    # what a person said is none
    assert report.counts.guessed == len(guessed) == 1
    assert {"attn" in pattern for pattern in guessed} == {True}
    with pytest.raises(migrate.MigrateError, match="M904"):
        migrate.new(by_headers, from_diff=(old, new))
    report = migrate.new(by_values, from_diff=(old, new))
    assert report.counts.guessed == 0
    assert not any(marked(by_values).values())
    assert [d.code for d in report.diagnostics] == []
    # the one without a mark says the same of these keys, so it can take the place of the other
    made = [set(migrate.migrate_state_dict(old, rules=[f])) for f in (by_headers, by_values)]
    assert made[0] == made[1] == set(new)


def test_values_set_right_what_names_mislead(tmp_path: Path) -> None:
    dice = np.random.default_rng(4)
    first, second = dice.standard_normal((2, 8)).astype("f4")
    # a release that exchanged the names
    old, new = {"m.alpha": first, "m.beta": second}, {"m.alpha": second, "m.beta": first}
    report = migrate.new(tmp_path / "names.yaml", from_diff=(old, new), headers=True)
    counts = report.counts
    assert (counts.rules, counts.keep, counts.guessed, counts.keep_guessed) == (0, 1, 0, 1)
    made = yaml.safe_load((tmp_path / "names.yaml").read_text())
    assert made["guessed"] == made["keep"] == ["m.{k...}"]
    assert "M652" in [d.code for d in report.diagnostics]
    # what the file makes was compared with the new weights before it was written
    report = migrate.new(tmp_path / "values.yaml", from_diff=(old, new))
    counts = report.counts
    assert (counts.rules, counts.keep, counts.guessed, counts.keep_guessed) == (1, 0, 0, 0)
    assert "guessed" not in (tmp_path / "values.yaml").read_text()


def test_keys_that_stay_are_guessed_until_values_were_compared(tmp_path: Path) -> None:
    dice = np.random.default_rng(5)
    old = {name: dice.standard_normal(8).astype("f4") for name in ("a.w", "b.w", "c.w")}
    new = {"a.w": old["a.w"], "b.w": old["b.w"], "d.w": old["c.w"]}
    answers = {"a.w": "a.w", "c.w": "d.w"}
    file = tmp_path / "names.yaml"
    report = migrate.new(file, from_diff=(old, new), headers=True, answers=answers)
    # what a person said is none
    assert yaml.safe_load(file.read_text())["guessed"] == ["b.w"]
    assert (report.counts.keep, report.counts.keep_guessed) == (2, 1)
    migrate.new(tmp_path / "values.yaml", from_diff=(old, new))
    assert "guessed" not in (tmp_path / "values.yaml").read_text()


@pytest.mark.heavy
def test_a_tensor_that_would_have_to_be_held_needs_the_memory(tmp_path: Path) -> None:
    import torch

    state = {"a": torch.zeros(2048, 2048, dtype=torch.float32).T.contiguous().T}
    torch.save(state, tmp_path / "old.pt")
    with pytest.raises(migrate.MigrateError, match=r"M919.*do not lie in order"):
        migrate.new(tmp_path / "m.yaml", from_diff=(tmp_path / "old.pt", state), max_memory="16MB")


MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(6, 8)

def refusing():
    raise RuntimeError("no model today")
"""


@pytest.mark.heavy
def test_a_module_that_code_makes_gives_names_and_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "toy_release.py").write_text(MODEL)
    save_file(
        {"old_proj.weight": np.zeros((8, 6), "f4"), "old_proj.bias": np.zeros(8, "f4")},
        tmp_path / "old.safetensors",
    )
    file, name = tmp_path / "made.yaml", "module:toy_release"
    pair = tmp_path / "old.safetensors", f"{name}:Model"
    for options, said in (
        ({"headers": True}, "would run code"),
        ({"allow": ["code"]}, "has no values"),
    ):
        with pytest.raises(migrate.MigrateError, match=said):
            migrate.new(file, from_diff=pair, **options)
    for wrong, said in (
        (f"{name}:refusing", "no model today"),
        ("module:nowhere.at:all", "nowhere"),
    ):
        with pytest.raises(migrate.MigrateError, match=said):
            migrate.new(file, from_diff=(pair[0], wrong), headers=True, allow=["code"])
    report = migrate.new(file, from_diff=pair, headers=True, allow=["code"])
    assert (report.counts.rules, report.counts.guessed) == (1, 1)
    # the command says what it runs, before it does
    options = ("new", "-o", tmp_path / "again.yaml", "--headers", "--from-diff", *pair)
    refused = run(*options)
    assert (refused.exit, "running" in refused.err) == (2, False)
    told = run(*options, "--allow", "code")
    assert (told.exit, told.err.splitlines()[0]) == (0, "running toy_release:Model")


def stored(state: Mapping[str, tuple[str, np.ndarray]]) -> bytes:
    """A safetensors file of raw elements."""
    names = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16"}
    header, data = {}, b""
    for key, (dtype, array) in state.items():
        ends = [len(data), len(data) + array.nbytes]
        header[key] = {"dtype": names[dtype], "shape": array.shape, "data_offsets": ends}
        data += array.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_encoded_weights_are_decoded_by_the_codecs_own_tables_or_named(tmp_path: Path) -> None:
    dice = np.random.default_rng(4)
    codes = dice.integers(0, 0x78, (256, 128)).astype("u1")
    scales = np.exp2(dice.integers(-3, 3, (2, 1))).astype("f4")
    old = {
        "m.weight": ("float8_e4m3fn", codes),
        "m.weight_scale_inv": ("float32", scales.view("<u4")),
    }
    # the definition of the format: four bits of exponent, three of mantissa
    powers, fractions = codes >> 3, (codes & 7) / 8
    numbers = np.where(powers, np.exp2(powers - 7.0) * (1 + fractions), np.exp2(-6.0) * fractions)
    numbers = (numbers * scales.repeat(128, 0)).astype("<f4")
    plain = {"m.weight": ("bfloat16", (numbers.view("<u4") >> 16).astype("<u2"))}
    (relation,) = infer(opened(old), opened(plain)).relations
    assert relation.roles == ("weight", "scale")
    assert relation.ops[0]["dequantize"]["codec"] == "fp8-block"
    for name, state in (("old", old), ("new", plain)):
        (tmp_path / f"{name}.safetensors").write_bytes(stored(state))
    file = tmp_path / "made.yaml"
    report = migrate.new(
        file, from_diff=(tmp_path / "old.safetensors", tmp_path / "new.safetensors")
    )
    assert (report.counts.rules, report.counts.guessed) == (1, 0)
    assert "dequantize: {codec: fp8-block, dtype: bfloat16" in file.read_text()
    other = {"m.weight": ("bfloat16", plain["m.weight"][1][::-1])}
    (rest,) = infer(opened(old), opened(other)).unexplained
    assert "encoded as fp8-block" in rest.why
    back = infer(opened(plain), opened(old)).unexplained
    assert {one.key for one in back} == set(old)
    assert all("fp8-block: a rule with `quantize`" in one.why for one in back)


def test_a_cast_and_a_move_at_once(tmp_path: Path) -> None:
    dice = np.random.default_rng(8)
    old = {f"l.{n}.w": dice.standard_normal((12, 16)).astype("f4") for n in range(2)}
    new = {f"b.{n}.w": np.ascontiguousarray(old[f"l.{n}.w"].T.astype("f2")) for n in range(2)}
    file = tmp_path / "made.yaml"
    report = migrate.new(file, from_diff=(old, new))
    assert report.counts.rules == 1
    other = {key: dice.standard_normal((12, 16)).astype("f4") for key in old}
    save_file(other, tmp_path / "other.safetensors")
    made = tmp_path / "made.safetensors"
    migrate.apply(tmp_path / "other.safetensors", made, rules=[file], allow={"lossy"})
    got = load_file(made)
    for n in range(2):
        assert np.array_equal(got[f"b.{n}.w"], other[f"l.{n}.w"].T.astype("f2"))


def cut(seed: int, ranks: int) -> tuple[list[Arrays], Arrays]:
    """A weight cut by rows and a bias cut alike, norms that every rank has, and the whole."""
    dice = np.random.default_rng(seed)
    parts: list[Arrays] = [{} for _ in range(ranks)]
    whole: Arrays = {}
    for n in range(3):
        weight = dice.standard_normal((4 * ranks, 6)).astype("f4")
        whole |= {f"b.{n}.up.weight": weight, f"b.{n}.up.bias": np.zeros(4 * ranks, "f4")}
        norms = {"pre_norm": dice.standard_normal(6).astype("f4"), "post_norm": np.ones(6, "f4")}
        whole |= {f"b.{n}.{name}": array for name, array in norms.items()}
        for rank, part in enumerate(parts):
            rows = slice(4 * rank, 4 * rank + 4)
            part |= {f"l.{n}.w.weight": weight[rows], f"l.{n}.w.bias": np.zeros(4, "f4")}
            part |= {f"l.{n}.{name}": array for name, array in norms.items()}
    return parts, whole


def of_ranks(folder: Path, parts: list[Arrays]) -> Path:
    folder.mkdir()
    for rank, part in enumerate(parts):
        save_file(part, folder / f"consolidated.{rank:02}.safetensors")
    return folder


def read_whole(path: Path) -> dict[str, Arrays]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {file.name if path.is_dir() else "": load_file(file) for file in files}


@pytest.mark.parametrize("back", [False, True])
def test_what_every_rank_holds_alike_is_one_tensor_of_the_whole(back: bool, tmp_path: Path) -> None:
    sides = []
    for seed in (1, 2):
        parts, whole = cut(seed, 4)
        save_file(whole, tmp_path / f"whole{seed}.safetensors")
        pair = of_ranks(tmp_path / f"ranks{seed}", parts), tmp_path / f"whole{seed}.safetensors"
        sides.append(pair[::-1] if back else pair)
    file = tmp_path / "made.yaml"
    report = migrate.new(file, from_diff=sides[0])
    text = file.read_text()
    assert (
        f"{{{'copy' if back else 'same'}: {{{'into' if back else 'over'}: r, count: 4}}}}" in text
    )
    assert migrate.test(file).passed
    assert report.counts.rules <= 4
    made = tmp_path / ("made" if back else "made.safetensors")
    migrate.apply(sides[1][0], made, rules=[file])
    got, wanted = (list(read_whole(path).values()) for path in (made, sides[1][1]))
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], array) for key, array in other.items())
    # and goes back
    again = tmp_path / ("again.safetensors" if back else "again")
    migrate.downgrade(made, again, rules=[file])
    for one, other in zip(*(read_whole(p).values() for p in (again, sides[1][0])), strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], array) for key, array in other.items())


def test_what_is_done_on_each_rank_is_said_once_and_without_ranks(tmp_path: Path) -> None:
    parts, _ = cut(1, 2)
    news = [
        {key.replace("l.", "h.").replace("w.", "fc."): array.T for key, array in part.items()}
        for part in parts
    ]
    news = [{k: np.ascontiguousarray(a) for k, a in part.items()} for part in news]
    file = tmp_path / "made.yaml"
    pair = of_ranks(tmp_path / "old", parts), of_ranks(tmp_path / "new", news)
    migrate.new(file, from_diff=pair)
    rules = file.read_text().partition("rules:")[2].partition("tests:")[0]
    assert "@" not in rules
    other, _ = cut(2, 2)
    migrate.apply(of_ranks(tmp_path / "other", other), tmp_path / "made", rules=[file])
    for got, part in zip(read_whole(tmp_path / "made").values(), other, strict=True):
        wanted = {k.replace("l.", "h.").replace("w.", "fc."): a.T for k, a in part.items()}
        assert got.keys() == wanted.keys()
        assert all(np.array_equal(got[key], array) for key, array in wanted.items())


HOSTILE = [
    "a{b}.{n:int}", 'quo"te\'s', "line\nbreak", "tab\t\x1b[31m", "..dots..", ".", "#hash: {x}",
    "at@sign", "{k...}", "null", "1.2", "*", "&anchor", "- dash", "%percent", "ütf-\u2028",
]  # fmt: skip


def test_hostile_names_mean_the_same_keys_in_the_file(tmp_path: Path) -> None:
    dice = np.random.default_rng(6)
    old = {key: dice.standard_normal((4, 5)).astype("f4") for key in HOSTILE}
    new = {f"{key}.moved": array for key, array in old.items()}
    for there, back in ((old, new), (new, old)):
        file = tmp_path / f"made-{len(there)}-{min(back)[:1] == min(there)[:1]}-{there is old}.yaml"
        migrate.new(file, from_diff=(there, back))
        other = {key: array + 1 for key, array in there.items()}
        got = migrate.migrate_state_dict(other, rules=[file])
        assert got.keys() == back.keys()
        for key, array in back.items():
            assert np.array_equal(np.asarray(got[key]), array + 1)


@pytest.mark.heavy
def test_on_a_terminal_questions_come_one_at_a_time(tmp_path: Path) -> None:
    ones = np.ones(8, "f4")
    save_file(
        {f"l.{i}.{w}_norm": ones for i in range(2) for w in ("input", "post")},
        tmp_path / "old.safetensors",
    )
    save_file(
        {f"b.{i}.norm{n}": ones for i in range(2) for n in (1, 2)}, tmp_path / "new.safetensors"
    )
    file = tmp_path / "made.yaml"
    ours, theirs = os.openpty()
    argv = [sys.executable, "-m", "migrate", "new", "-o", file, "--from-diff"]
    argv += [tmp_path / "old.safetensors", tmp_path / "new.safetensors"]
    with subprocess.Popen(argv, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE) as process:
        os.close(theirs)
        os.write(ours, b"1\n")
        out, _ = process.communicate()
        said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert process.returncode == 0, said
    assert b"2 rules, 1 of them guessed" in out
    # the second question is decided by the answer to the first
    assert said.count("which old tensor became") == 1
    assert "likeness" in said
