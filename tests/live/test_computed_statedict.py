"""State dicts and files whose values are computed, through the engine that applies them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import migrate
from migrate.core.errors import MigrateError

CASES = Path(__file__).parents[1] / "data" / "cases"
HEAD = "id: t/x\ntitle: t\nlineage: t\nedge: [a, b]\nrules:\n"


def rules(tmp_path, via, keys="'{k...}'"):
    path = tmp_path / "rule.yaml"
    path.write_text(f"{HEAD}  - {{name: r, from: {keys}, to: '{{k}}', via: [{via}]}}\n")
    return [path]


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_an_adapter_is_merged_in_memory():
    torch.manual_seed(0)
    base, a, b = (
        torch.randn(130, 70).bfloat16(),
        torch.randn(4, 70).bfloat16(),
        torch.randn(130, 4).bfloat16(),
    )
    s = {
        "m.q.weight": base,
        "base_model.model.m.q.lora_A.weight": a,
        "base_model.model.m.q.lora_B.weight": b,
        "m.n.weight": torch.ones(3),
    }
    out = migrate.apply(
        s, rules=[CASES / "c17-lora-merge.yaml"], params={"alpha": 6, "rank": 4}, allow=["lossy"]
    )
    assert sorted(out) == ["m.n.weight", "m.q.weight"]
    wanted = (base.double() + (b.double() @ a.double()) * 1.5).bfloat16()
    assert torch.equal(out["m.q.weight"], wanted)


def test_a_decay_rate_is_computed_in_memory(tmp_path):
    x = torch.linspace(-3, 3, 50)
    out = migrate.apply({"A_log": x}, rules=rules(tmp_path, "{neg_exp: {}}"), allow=["lossy"])
    assert torch.equal(out["A_log"], (-torch.exp(x.double())).float())


def test_bfloat16_goes_to_float32_files_and_comes_back(tmp_path):
    every = (
        torch.arange(65536, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .reshape(256, 256)
    )
    save_file({"w": every, "n": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    files = rules(tmp_path, "{cast: {to: float32, from: bfloat16}}")
    migrate.apply(tmp_path / "a.safetensors", out=tmp_path / "b.safetensors", rules=files)
    wide = load_file(tmp_path / "b.safetensors")
    assert torch.equal(wide["w"].view(torch.int32), every.view(torch.int16).to(torch.int32) << 16)
    assert migrate.verify(
        tmp_path / "b.safetensors", source=tmp_path / "a.safetensors", rules=files
    ).equal
    migrate.downgrade(tmp_path / "b.safetensors", out=tmp_path / "c.safetensors", rules=files)
    back = load_file(tmp_path / "c.safetensors")
    assert torch.equal(bits(back["w"]), bits(every))


def test_computed_files_are_verified_by_another_route(tmp_path):
    torch.manual_seed(1)
    s = {
        "m.q.weight": torch.randn(200, 300),
        "base_model.model.m.q.lora_A.weight": torch.randn(8, 300),
    }
    save_file(
        s | {"base_model.model.m.q.lora_B.weight": torch.randn(200, 8)}, tmp_path / "a.safetensors"
    )
    said = {
        "rules": [CASES / "c17-lora-merge.yaml"],
        "params": {"alpha": 6, "rank": 8},
        "allow": ["lossy"],
    }
    migrate.apply(tmp_path / "a.safetensors", out=tmp_path / "b.safetensors", **said)
    assert migrate.verify(
        tmp_path / "b.safetensors", source=tmp_path / "a.safetensors", **said
    ).equal
    said = {
        "rules": rules(
            tmp_path, "{affine: {mul: 0.3, add: 1}}, {neg_exp: {}}, {cast: {to: float16}}"
        ),
        "allow": ["lossy"],
    }
    migrate.apply(tmp_path / "b.safetensors", out=tmp_path / "c.safetensors", **said)
    assert migrate.verify(
        tmp_path / "c.safetensors", source=tmp_path / "b.safetensors", **said
    ).equal


def test_a_tensor_that_was_changed_does_not_go_back_silently(tmp_path):
    files = rules(tmp_path, "{cast: {to: float32, from: bfloat16}}")
    save_file({"w": torch.tensor([[1.0, 2.0], [1.001, 3.0]])}, tmp_path / "b.safetensors")
    with pytest.raises(MigrateError, match=r"M406(.|\n)*1\.001\d* at \[1, 0\]") as caught:
        migrate.downgrade(tmp_path / "b.safetensors", out=tmp_path / "c.safetensors", rules=files)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "c.safetensors").exists()


@pytest.fixture
def merged(tmp_path):
    """Files of float64, whose sums depend on the order in which a library adds, and what verifies
    them.
    """
    torch.manual_seed(2)
    kinds = {"weight": (90, 70), "A": (16, 70), "B": (90, 16)}
    save_file(
        {f"m.{name}": torch.randn(*shape, dtype=torch.float64) for name, shape in kinds.items()},
        tmp_path / "a.safetensors",
    )
    keys = "{base: '{k...}.weight', a: '{k}.A', b: '{k}.B'}"
    files = rules(
        tmp_path,
        "{lora_merge: {alpha: 2, rank: 16}}, {transpose: {dims: [0, 1]}}, {slice: {dim: 0, start: "
        "3, stop: 60}}",
        keys,
    )
    said = {"rules": files, "allow": ["lossy", "drop"]}
    migrate.apply(tmp_path / "a.safetensors", out=tmp_path / "b.safetensors", **said)
    return lambda made: migrate.verify(made, source=tmp_path / "a.safetensors", **said)


def test_sums_in_another_order_are_verified_within_their_bound_and_told(tmp_path, merged):
    tensor = load_file(tmp_path / "b.safetensors")["m"]
    # whatever order the library here adds in, this one is another
    tensor[5, 7] = tensor[5, 7].nextafter(torch.tensor(torch.inf, dtype=torch.float64))
    save_file({"m": tensor}, tmp_path / "c.safetensors")
    answer = merged(tmp_path / "c.safetensors")
    assert answer.equal is True
    (near,) = answer.to_json()["near"]
    assert near["key"] == "m"
    assert "by no more than lora_merge may" in near["what"]


@pytest.mark.parametrize("wrong", [1e-9, float("nan")])
def test_what_is_further_off_than_the_bound_is_a_difference(tmp_path, merged, wrong):
    tensor = load_file(tmp_path / "b.safetensors")["m"]
    tensor[5, 7] += wrong
    save_file({"m": tensor}, tmp_path / "c.safetensors")
    answer = merged(tmp_path / "c.safetensors")
    assert (answer.equal, answer.to_json()["near"]) == (False, [])
    assert "by more than lora_merge may" in answer.to_json()["differences"][0]["what"]


def test_a_result_that_is_computed_with_again_is_compared_by_its_bytes(tmp_path):
    files = rules(tmp_path, "{neg_exp: {}}, {affine: {mul: 3}}")
    save_file({"w": torch.linspace(-1, 1, 9)}, tmp_path / "a.safetensors")
    migrate.apply(
        tmp_path / "a.safetensors", out=tmp_path / "b.safetensors", rules=files, allow="lossy"
    )
    assert migrate.verify(
        tmp_path / "b.safetensors", source=tmp_path / "a.safetensors", rules=files
    ).equal
    tensor = load_file(tmp_path / "b.safetensors")["w"]
    tensor[4] = tensor[4].nextafter(torch.tensor(torch.inf))
    save_file({"w": tensor}, tmp_path / "c.safetensors")
    answer = migrate.verify(
        tmp_path / "c.safetensors", source=tmp_path / "a.safetensors", rules=files
    )
    assert [d["what"] for d in answer.to_json()["differences"]] == [
        "1 of 9 elements differ, first at [4]"
    ]


def test_the_bound_of_scalars_that_are_stacked_is_known_by_element(tmp_path):
    files = rules(
        tmp_path, "{neg_exp: {}}, {permute: {dims: []}}, {stack: {over: k}}", "'b.{k:x|y}'"
    )
    files[0].write_text(files[0].read_text().replace("to: '{k}'", "to: s"))
    save_file({"b.x": torch.tensor(0.25), "b.y": torch.tensor(-1.5)}, tmp_path / "a.safetensors")
    migrate.apply(
        tmp_path / "a.safetensors", out=tmp_path / "b.safetensors", rules=files, allow="lossy"
    )
    tensor = load_file(tmp_path / "b.safetensors")["s"]
    assert torch.equal(tensor, (-torch.exp(torch.tensor([0.25, -1.5]).double())).float())
    for up, differences, near in ((1, 0, 1), (3, 1, 0)):
        other = tensor.clone()
        for _ in range(up):
            other[1] = other[1].nextafter(torch.tensor(torch.inf))
        save_file({"s": other}, tmp_path / "c.safetensors")
        answer = migrate.verify(
            tmp_path / "c.safetensors", source=tmp_path / "a.safetensors", rules=files
        )
        assert (len(answer.to_json()["differences"]), len(answer.to_json()["near"])) == (
            differences,
            near,
        )
