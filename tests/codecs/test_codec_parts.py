"""Parts that need not be there, parts whose bytes give the shape, and codecs that only decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import acme_codecs
import dcp_folders
import numpy as np
import pytest
import torch
from rule_text import load_text
from safetensors.torch import load_file, save_file

import migrate
from migrate.core.errors import MigrateError, QuestionError

HEAD = "id: a/b\ntitle: t\nlineage: a\nedge: [one, two]\nrules:\n"
PARTS = (
    '{weight: "{m...}.codes", scale: "{m...}.scales", zero: "{m...}.zeros", shape: "{m...}.length"}'
)
DECODE = HEAD + (
    f'  - name: r\n    from: {PARTS}\n    to: "{{m}}.weight"\n    optional: [zero, shape]\n'
    "    via: [{dequantize: {codec: acme-ints, dtype: float32, bits: 4, group: 2}}]\n"
)
CODES = torch.tensor([[0x21, 0x43, 0x65], [0xA9, 0xCB, 0x0D]], dtype=torch.uint8)
SCALES = torch.full((2, 3), 2.0)
ZEROS = torch.full((2, 3), 3, dtype=torch.uint8)
ALLOW = {"allow": ["lossy"]}


@pytest.fixture(scope="module", autouse=True)
def third_parties():
    with acme_codecs.installed(acme_codecs.Ints(), acme_codecs.Table()):
        yield


def groups() -> dict[str, torch.Tensor]:
    """Four tensors: without and with a zero, of even and of odd rows."""
    out = {}
    for number in range(4):
        out |= {f"l.{number}.codes": CODES.clone(), f"l.{number}.scales": SCALES.clone()}
    out |= {"l.1.zeros": ZEROS.clone(), "l.3.zeros": ZEROS.clone()}
    out |= {f"l.{n}.length": torch.tensor([2, 5]) for n in (2, 3)}
    return out


# (code - zero) * 2, codes low nibble first, 8 without a zero
PLAIN = [[1, 2, 3, 4, 5, 6], [9, 10, 11, 12, 13, 0]]
WANTED = {
    f"l.{n}.weight": [[(code - zero) * 2.0 for code in row[:length]] for row in PLAIN]
    for n, zero, length in ((0, 8, 6), (1, 3, 6), (2, 8, 5), (3, 3, 5))
}


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(DECODE)
    return path


def write(folder: Path, name: str, state: dict[str, torch.Tensor]) -> Path:
    path = folder / name
    if name.endswith(".safetensors"):
        save_file(state, path)
    elif name.endswith(".pt"):
        torch.save(state, path)
    else:
        dcp_folders.save(path, state)
    return path


def lists(state: Any) -> dict[str, Any]:
    return {key: tensor.tolist() for key, tensor in state.items()}


def specs(state: Any) -> dict[str, Any]:
    return {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in state.items()}


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a-dcp"])
def test_a_rule_takes_groups_with_and_without_them_and_makes_the_same_again(
    name: str, rule: Path, tmp_path: Path
) -> None:
    source, how = write(tmp_path, name, groups()), {"rules": [rule], **ALLOW}
    plan = migrate.plan(source, **how)
    assert plan.document["downgrade"]["because"] == [
        f"rule r ({rule}:6:11): values do not return exactly"
    ]
    out = tmp_path / "b.safetensors"
    migrate.apply(source, out, output_format="safetensors", **how)
    assert lists(load_file(out)) == WANTED
    assert migrate.verify(out, source=source, **how).to_json()["differences"] == []
    (entry,) = migrate.history(out).to_json()["applied"]
    assert entry["absent"] == [
        ["l.{}.zeros", [[0, 0], [2, 2]]], ["l.{}.length", [[0, 1]]],
    ] or sorted(map(json.dumps, entry["absent"]))  # fmt: skip
    back = tmp_path / "c.safetensors"
    migrate.downgrade(out, back, **how)
    assert specs(load_file(back)) == specs(groups())
    migrate.apply(back, tmp_path / "d.safetensors", **how)
    again = load_file(tmp_path / "d.safetensors")
    assert {key: t.shape for key, t in again.items()} == {
        key: t.shape for key, t in load_file(out).items()
    }


def test_a_state_dict_in_memory_is_migrated_in_the_same_way(rule: Path) -> None:
    assert lists(migrate.apply(groups(), rules=[rule], **ALLOW)) == WANTED


def test_they_may_be_joined_afterwards(tmp_path: Path) -> None:
    text = DECODE.replace('to: "{m}.weight"', 'to: "{m}.weight"').replace(
        "{m...}.", "{m...}.{e:int}."
    )
    text = text.replace("group: 2}}]", "group: 2}}, {stack: {over: e, count: 2}}]")
    rule = tmp_path / "r.yaml"
    rule.write_text(text)
    state = {key: t for key, t in groups().items() if key.startswith(("l.0", "l.1"))}
    source, how = write(tmp_path, "a.safetensors", state), {"rules": [rule], **ALLOW}
    migrate.apply(source, tmp_path / "b.safetensors", **how)
    made = load_file(tmp_path / "b.safetensors")
    assert lists(made) == {"l.weight": [WANTED["l.0.weight"], WANTED["l.1.weight"]]}
    migrate.downgrade(tmp_path / "b.safetensors", tmp_path / "c.safetensors", **how)
    assert specs(load_file(tmp_path / "c.safetensors")) == specs(state)


def test_without_a_stamp_the_arguments_say_which_are_made(rule: Path, tmp_path: Path) -> None:
    weight = {"l.0.weight": torch.tensor([[1.0, -2, 3, 4, 5]])}
    source = write(tmp_path, "w.safetensors", weight)
    how: dict[str, Any] = {"rules": [rule], **ALLOW, "from_": ["two"]}
    how.pop("from_")
    migrate.downgrade(source, tmp_path / "p.safetensors", **how)
    assert sorted(load_file(tmp_path / "p.safetensors")) == [
        "l.0.codes",
        "l.0.length",
        "l.0.scales",
    ]
    rule.write_text(DECODE.replace("group: 2}", "group: 2, symmetric: false}"))
    migrate.downgrade(source, tmp_path / "q.safetensors", **how)
    assert sorted(load_file(tmp_path / "q.safetensors")) == [
        "l.0.codes", "l.0.length", "l.0.scales", "l.0.zeros",
    ]  # fmt: skip


ENCODE = HEAD + (
    '  - {name: r, from: "{m...}.weight", to: {%s}, '
    "via: [{quantize: {codec: acme-ints, bits: 4, group: 2}}]}\n"
)


def test_quantize_makes_the_parts_that_the_rule_has_names_for(tmp_path: Path) -> None:
    rule = tmp_path / "r.yaml"
    weight = {"a.weight": torch.tensor([[1.0, -2, 3, 5]])}
    for roles in (("weight", "scale"), ("weight", "scale", "zero")):
        rule.write_text(ENCODE % ", ".join(f'{role}: "{{m}}.{role}s"' for role in roles))
        made = migrate.apply(weight, rules=[rule], **ALLOW)
        assert sorted(made) == sorted(f"a.{role}s" for role in roles)
    odd = {"a.weight": torch.tensor([[1.0, -2, 3]])}
    with pytest.raises(MigrateError) as caught:
        migrate.apply(odd, rules=[rule], **ALLOW)
    assert (
        "quantize: acme-ints makes the weight, scale, zero, shape of float32 [1, 3]; the rule has "
        "names for the weight, scale, zero"
    ) in str(caught.value)
    assert caught.value.diagnostics[0].code == "M408"


def test_a_part_that_is_needed_is_missed_whatever_the_rule_says(rule: Path) -> None:
    state = groups()
    del state["l.2.scales"]
    with pytest.raises(MigrateError) as caught:
        migrate.apply(state, rules=[rule], **ALLOW)
    assert "missing: l.2.scales" in str(caught.value)
    rule.write_text(DECODE.replace("[zero, shape]", "[scale, zero, shape]"))
    with pytest.raises(MigrateError) as caught:
        migrate.apply(state, rules=[rule], **ALLOW)
    (found,) = caught.value.diagnostics
    assert found.code == "M408"
    assert "acme-ints cannot be decoded without its scale; there is only the weight, shape" in (
        found.message
    )


def test_parts_that_numbers_have_no_use_for_are_dropped_and_said(tmp_path: Path) -> None:
    rule = tmp_path / "r.yaml"
    rule.write_text(
        DECODE.replace('length"}', 'length", input_scale: "{m...}.input_scale"}').replace(
            "[zero, shape]", "[zero, shape, input_scale]"
        )
    )
    state = groups() | {"l.1.input_scale": torch.tensor(0.5)}
    source = write(tmp_path, "a.safetensors", state)
    with pytest.raises(MigrateError) as caught:
        migrate.plan(source, rules=[rule], **ALLOW)
    (found,) = caught.value.diagnostics
    why = "it scales activations, which a layer of plain weights does not encode"
    assert (found.code, found.message) == ("M402", f"rule 'r' drops 1 tensor: {why}")
    assert found.notes == ("l.1.input_scale",)
    how: dict[str, Any] = {"rules": [rule], "allow": ["lossy", "drop"]}
    plan = migrate.plan(source, **how)
    (row,) = [row for row in plan.document["rows"] if row["change"] == "dropped"]
    assert (row["from"], row["why"]) == (["l.1.input_scale"], why)
    because = plan.document["downgrade"]["because"]
    assert because[-1] == f"rule r ({rule}:6:11): not restored: l.1.input_scale"
    out = tmp_path / "b.safetensors"
    migrate.apply(source, out, **how)
    assert lists(load_file(out)) == WANTED
    assert migrate.verify(out, source=source, **how).to_json()["differences"] == []
    migrate.downgrade(out, tmp_path / "c.safetensors", **how)
    assert specs(load_file(tmp_path / "c.safetensors")) == specs(groups())


# codecs that decode only

TABLE = HEAD + (
    '  - {name: r, from: {weight: "{m...}.indices", table: "{m...}.table"}, to: "{m}.weight", '
    "via: [{dequantize: {codec: acme-table, dtype: float32}}]}\n"
)


def looked_up() -> dict[str, torch.Tensor]:
    return {
        "a.indices": torch.tensor([[3, 0, 255]], dtype=torch.uint8),
        "a.table": torch.arange(256).float() / 2,
    }


def test_a_codec_that_only_decodes_is_one_way(tmp_path: Path) -> None:
    rule = tmp_path / "r.yaml"
    rule.write_text(TABLE)
    source = write(tmp_path, "a.safetensors", looked_up())
    plan = migrate.plan(source, rules=[rule])
    assert plan.document["downgrade"]["exact"] is False
    assert "dequantize: acme-table is only decoded" in plan.document["downgrade"]["because"][0]
    out = tmp_path / "b.safetensors"
    migrate.apply(source, out, rules=[rule])
    assert lists(load_file(out)) == {"a.weight": [[1.5, 0, 127.5]]}
    assert migrate.verify(out, source=source, rules=[rule]).to_json()["differences"] == []
    with pytest.raises(MigrateError) as caught:
        migrate.downgrade(out, tmp_path / "c.safetensors", rules=[rule])
    (found,) = caught.value.diagnostics
    assert found.code == "M405"
    assert found.message == (
        "rule 'r' has no exact inverse: dequantize: acme-table is only decoded, nothing encodes it"
    )


def test_quantize_with_it_is_refused_where_it_stands() -> None:
    text = HEAD + (
        '  - {name: r, from: "{m...}.w", to: {weight: "{m}.i", table: "{m}.t"}, '
        "via: [{quantize: {codec: acme-table}}]}\n"
    )
    with pytest.raises(QuestionError) as caught:
        load_text(text, "r.yaml")
    (found,) = caught.value.diagnostics
    assert (found.code, found.message, found.spans[0].line) == (
        "M308", "quantize: acme-table is only decoded, nothing encodes it", 6,
    )  # fmt: skip


# parts whose bytes give the shape


def test_bytes_that_disagree_with_the_shapes_are_refused_by_name_while_planning(
    rule: Path, tmp_path: Path
) -> None:
    state = groups() | {"l.2.length": torch.tensor([2, 7])}
    source = write(tmp_path, "a.safetensors", state)
    with pytest.raises(MigrateError) as caught:
        migrate.plan(source, rules=[rule], **ALLOW)
    (found,) = caught.value.diagnostics
    assert found.code == "M310"
    assert found.message.endswith("`shape` says [2, 7], the codes are [2, 3]")
    assert any("l.2.length" in note for note in found.notes)


def test_a_large_one_is_not_read(rule: Path, tmp_path: Path) -> None:
    state = groups() | {"l.2.length": torch.zeros(8193, dtype=torch.int64)}
    with pytest.raises(MigrateError) as caught:
        migrate.plan(write(tmp_path, "a.safetensors", state), rules=[rule], **ALLOW)
    (found,) = caught.value.diagnostics
    assert found.code == "M310"
    assert "l.2.length is int64 [8193]" in found.message
    assert "at most 65,536 bytes" in found.message


def test_they_are_part_of_what_a_plan_decides(rule: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"rules": [rule], **ALLOW}
    one = {"l.0.codes": CODES, "l.0.scales": SCALES, "l.0.length": torch.tensor([2, 5])}
    plan = migrate.plan(write(tmp_path, "a.safetensors", one), **how)
    other = one | {"l.0.length": torch.tensor([2, 6])}
    again = migrate.plan(write(tmp_path, "b.safetensors", other), **how)
    assert plan.digest != again.digest
    assert plan.digest == migrate.plan(tmp_path / "a.safetensors", **how).digest
    saved = tmp_path / "plan.json"
    saved.write_text(plan.to_json())
    write(tmp_path, "a.safetensors", other)
    with pytest.raises(MigrateError) as caught:
        migrate.apply(saved, tmp_path / "out.safetensors")
    assert caught.value.diagnostics[0].code == "M903"


def test_tensors_without_values_are_refused_by_name(rule: Path) -> None:
    state = groups()
    bare = {k: t if k.endswith("length") else t.to("meta") for k, t in state.items()}
    plan = migrate.plan(bare, rules=[rule], **ALLOW)
    assert plan.document["target"]["tensors"] == 4
    bare["l.2.length"] = torch.empty(2, dtype=torch.int64, device="meta")
    with pytest.raises(MigrateError) as caught:
        migrate.plan(bare, rules=[rule], **ALLOW)
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (
        "M916",
        "l.2.length is on the meta device and holds no bytes",
    )


TESTS = """tests:
  - name: With a length and without a zero
    allow: [lossy]
    given:
      a.codes: {dtype: uint8, values: [[33, 3]]}
      a.scales: {dtype: float32, values: [[2, 3]]}
      a.length: {dtype: int64, values: [1, 3]}
    expect:
      a.weight: {dtype: float32, values: [[-14, -12, -15]]}
  - name: With a zero
    allow: [lossy]
    given:
      a.codes: {dtype: uint8, values: [[33, 3]]}
      a.scales: {dtype: float32, values: [[2, 3]]}
      a.zeros: {dtype: uint8, values: [[1, 0]]}
    expect:
      a.weight: {dtype: float32, values: [[0, 2, 9, 0]]}
  - name: With another length
    given:
      a.codes: {dtype: uint8, values: [[33, 3]]}
      a.scales: {dtype: float32, values: [[2, 3]]}
      a.length: {dtype: int64, values: [1, 5]}
    error: M310
    contains: "a.length"
"""


def test_tests_of_rules_and_lint_read_them_from_what_is_given(rule: Path) -> None:
    rule.write_text(DECODE + TESTS)
    assert migrate.test([rule]).to_json()["counts"]["failed"] == 0
    found = migrate.lint([rule]).to_json()["diagnostics"]
    assert [one["code"] for one in found if one["severity"] == "error"] == []


def test_little_memory_and_a_module_are_no_matter(rule: Path, tmp_path: Path) -> None:
    from built import module

    source, how = write(tmp_path, "a.safetensors", groups()), {"rules": [rule], **ALLOW}
    out = tmp_path / "b.safetensors"
    migrate.apply(source, out, max_memory=1 << 20, threads=2, **how)
    assert lists(load_file(out)) == WANTED
    model = module({key: torch.tensor(rows) for key, rows in WANTED.items()}, fill=0)
    migrate.load(model, source, **how)
    assert lists(model.state_dict()) == WANTED


def test_a_hook_reads_those_of_each_state_dict(rule: Path) -> None:
    from built import module

    wanted = {key: torch.tensor(rows) for key, rows in WANTED.items()}
    model = module(wanted, fill=0)
    migrate.attach(model, rules=[rule], **ALLOW)
    for _ in range(2):
        model.load_state_dict(groups())
        assert lists(model.state_dict()) == WANTED
    odd = groups() | {"l.2.length": torch.tensor([2, 6])}
    with pytest.raises((MigrateError, RuntimeError)) as caught:
        model.load_state_dict(odd)
    assert "l.2.weight" in str(caught.value)


def test_what_is_encoded_along_the_way_is_decoded_without_a_look(tmp_path: Path) -> None:
    rule = tmp_path / "r.yaml"
    rule.write_text(
        HEAD.replace("rules:\n", "rules:\n")
        + '  - {name: r, from: "{m...}.weight", to: {weight: "{m}.codes", scale: "{m}.scales", '
        'shape: "{m}.length"}, via: [{quantize: {codec: acme-ints, from: float32, bits: 4, '
        "group: 2}}]}\n"
    )
    source = write(tmp_path, "a.safetensors", {"a.weight": torch.tensor([[7.0, -7, 14]])})
    plan = migrate.plan(source, rules=[rule], **ALLOW)
    assert plan.document["downgrade"]["because"] == [
        f"rule r ({rule}:6:12): values do not return exactly"
    ]
    migrate.apply(source, tmp_path / "b.safetensors", rules=[rule], **ALLOW)
    made = load_file(tmp_path / "b.safetensors")
    assert lists(made) == {"a.codes": [[0x1F, 0x0F]], "a.scales": [[1, 2]], "a.length": [1, 3]}
    migrate.downgrade(tmp_path / "b.safetensors", tmp_path / "c.safetensors", rules=[rule], **ALLOW)
    assert lists(load_file(tmp_path / "c.safetensors")) == {"a.weight": [[7.0, -7, 14]]}
    assert np.all(made["a.codes"].numpy() < 0x20)
