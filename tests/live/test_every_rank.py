"""Every op that computes and every codec, on tensors of 0 to 4 axes and of sizes from 0, through
every way in and out.

What must come out is what the eager twins make of whole arrays. Ops and codecs are those of the
registries, with their own samples as arguments, so that a new one is tried without a line here.
Codecs of a third party are among them: one with a scale for a whole tensor, one with parts that
need not be there and one whose bytes say the shape, and one that only decodes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import acme_codecs
import numpy as np
import pytest
import torch
from built import HEAD, module
from marks import thorough
from safetensors.torch import load_file, save_file

import migrate
from migrate import codecs, ops
from migrate.codecs.kit.codec import LayoutCodec
from migrate.core.errors import MigrateError
from migrate.core.spec import BITS, Spec, spec
from migrate.elements.raw import carrier, raw, typed
from migrate.ops import dequantize
from migrate.ops.base import Op, OpError, ValueOp
from migrate.testing import valuekit
from migrate.testing.opkit import arguments

AXES = 5
ALLOW = ["lossy"]
# what a tensor of torch can be, of those that the kits use
DTYPES = tuple(d for d in valuekit.DTYPES if BITS[d] >= 8)
# an op above or below, so that what is computed is also read by another op, and a view of what is
# computed is read
BETWEEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cast", {"to": "float32"}), ("affine", {"mul": 2}), ("cast", {"to": "float4_e2m1fn"}),
    ("unsqueeze", {"dim": 0}),
    ("reshape", {"to": [-1]}),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def third_parties():
    with acme_codecs.installed(acme_codecs.PerTensor(), acme_codecs.Ints(), acme_codecs.Table()):
        yield


class Case(NamedTuple):
    """One rule: `steps` as they are written, the inputs by role ("" where there is one), and
    outputs as (spec, elements, slack).
    """

    steps: tuple[tuple[str, dict[str, Any]], ...]
    given: dict[str, tuple[Spec, Any]]
    made: dict[str, tuple[Spec, Any, Any]]


# what some formats become with codes and scales that are computed
FINER = {
    "mxfp4": ({"codec": "mxfp8"}, {"codec": "fp8-block", "block": [4, 64]}, {"codec": "nvfp4"}),
    "mxfp8": ({"codec": "fp8-block", "block": [2, 64]},),
    "int-pack": ({"codec": "int8", "symmetric": False}, {"codec": "gptq", "form": "v2"}),
    "int8": (
        {"codec": "int-pack", "bits": 8, "symmetric": False},
        {"codec": "gptq", "form": "v1", "bits": 8},
    ),
    "gptq": ({"codec": "int-pack", "symmetric": False}, {"codec": "gptq", "form": "v2"}),
    "awq": ({"codec": "int-pack", "symmetric": False}, {"codec": "gptq", "form": "v2"}),
    "int4-rows": ({"codec": "int8"}, {"codec": "int-pack"}),
}


def said_by(args: Any) -> dict[str, Any]:
    """The arguments of a codec as a rule has them."""
    return {
        key: list(v) if isinstance(v, tuple) else v
        for key in args.__dataclass_fields__
        if (v := getattr(args, key)) is not None
    }


def samples() -> list[tuple[Op, dict[str, Any], list[Any]]]:
    """(op, arguments, what its sample is): shapes of the inputs, the spec of a codec's numbers, or
    its stored parts.
    """
    found: list[Any] = []
    for name in ops.names():
        op = ops.get(name)
        if op.kind == "exchange" or not isinstance(op, ValueOp):
            continue
        if "codec" not in op.Args.__dataclass_fields__:
            found += [(op, written, shapes) for written, shapes in op.samples()]
    for name in codecs.names():
        for args, numbers in codecs.get(name).samples():
            if not all(holdable(p) for p in codecs.get(name).encoded(args, numbers) if p):
                # torch has no tensor with one code of four bits an element
                continue
            said = said_by(args)
            found.append((ops.get("quantize"), {"codec": name, **said}, [numbers]))
            found.append(
                (ops.get("dequantize"), {"codec": name, "dtype": "float32", **said}, [numbers])
            )
            if isinstance(codecs.get(name), LayoutCodec):
                one = {"codec": name, **said}
                # codes of e5m2 may have no equal among those of e4m3
                finer = () if said.get("codes") == "float8_e5m2" else FINER.get(name, ())
                for other in (one, *finer):
                    found.append((ops.get("recode"), {"from": one, "to": other}, [numbers]))
        for args, parts in codecs.get(name).stored():
            written = {"codec": name, "dtype": "float32", **said_by(args)}
            found.append((ops.get("dequantize"), written, parts))
            one = {"codec": name, **said_by(args)}
            for other in FINER.get(name, ()):
                found.append((ops.get("recode"), {"from": one, "to": other}, parts))
    return found


def elements(of: Spec, dice: random.Random) -> np.ndarray:
    """Whole numbers from 1 on that the dtype holds, and so does what ops make of them: memory that
    was not written shows.
    """
    most = {"bool": 1, "float8_e8m0fnu": 1}.get(of.dtype, 4 if BITS[of.dtype] <= 8 else 15)
    held = [raw(of.dtype, n) for n in range(1, most + 1)]
    return np.array(
        [held[dice.randrange(most)] for _ in range(of.numel)], carrier(of.dtype)
    ).reshape(of.shape)


def shapes_like(
    shapes: list[Any], args: Any, axes: int, dice: random.Random
) -> list[tuple[int, ...]]:
    """Of one input any shape with so many axes; of several, the sample's with other sizes, the same
    for the same, and axes in front.
    """
    if len(shapes) == 1:
        return [tuple(dice.choice([0, 1, 1, 2, 3, 5]) for _ in range(axes))]
    said = {
        getattr(args, name)
        for name in args.__dataclass_fields__
        if isinstance(getattr(args, name), int)
    }
    sizes = {n: n if n in said else dice.choice([0, 1, 2, 7]) for shape in shapes for n in shape}
    return [(2,) * max(0, axes - 2) + tuple(sizes[n] for n in shape) for shape in shapes]


def infer(op: Op, args: Any, specs: list[Spec]) -> list[Spec]:
    """The outputs of any op; OpError where it refuses."""
    if not {"roles", "inputs"} & args.__dataclass_fields__.keys():
        op.validate(args)
    found = op.infer(args, specs, op.parts(args, specs[0].shape, None) if op.kind == "part" else 1)
    if found is None:
        from migrate.core import view

        found = [
            spec(specs[0].dtype, v.shape)
            for v in op.trace(args, [view.stored(0, s.shape) for s in specs])
        ]
    return found


def settled(op: Op, args: Any, roles: tuple[str, ...], specs: Any, arrays: Any) -> Any:
    """The arguments for the parts that are there, or that are made."""
    if not isinstance(op, ValueOp):
        return args
    if op.kind == "exchange":
        return op.settle(args, roles, specs, planned(op, args, roles, arrays))
    if not op.settles(args, op.roles(getattr(args, "codec", ""))):
        return args
    if op.kind == "part":
        return op.settle(args, op.makes(args, specs[0]), specs, {})
    return op.settle(args, roles, specs, planned(op, args, roles, arrays))


def planned(op: ValueOp, args: Any, roles: tuple[str, ...], arrays: Any) -> dict[str, bytes]:
    """The bytes of the parts that are read while planning."""
    held = dict(zip(roles, arrays, strict=True))
    return {role: held[role].tobytes() for role in op.reads(args) if role in held}


def chained(
    steps: Any, given: list[tuple[Spec, Any]], roles: tuple[str, ...] = ()
) -> list[tuple[Spec, Any, Any]]:
    """What the eager twins make of the inputs, one after the other. OpError where an op refuses."""
    held: list[tuple[Spec, Any, Any]] = [(of, array, None) for of, array in given]
    for name, written in steps:
        op = ops.get(name)
        args, specs, arrays = (
            arguments(op, written),
            [s for s, _, _ in held],
            [a for _, a, _ in held],
        )
        dtypes = [s.dtype for s in specs]
        args = settled(op, args, roles, specs, arrays)
        if op.kind == "exchange":
            order = [roles.index(role) for role in args.inputs]
            specs, arrays = [specs[n] for n in order], [arrays[n] for n in order]
            dtypes = [s.dtype for s in specs]
        made = infer(op, args, specs)
        twins = op.eager(args, arrays, len(made), dtypes)
        slack: list[Any] = [None] * len(made)
        if isinstance(op, ValueOp) and not op.same_bits:
            slack = op.slack(args, arrays, dtypes)
        held = list(zip(made, twins, slack, strict=True))
        for of, array, _ in held:
            assert np.shape(array) == of.shape, (
                f"the eager twin of {name} makes {np.shape(array)} of {[str(s) for s in specs]}, "
                f"{of} is inferred"
            )
    return held


def holdable(of: Spec) -> bool:
    return BITS[of.dtype] >= 8


def case(
    op: Op, written: dict[str, Any], sample: list[Any], axes: int, dice: random.Random
) -> Case | list[Spec]:
    """A case of the sample with so many axes; where the op does not take any such input, one that
    it refuses.
    """
    args, roles = arguments(op, written), ("",)
    source = written["from"] if op.kind == "exchange" else written
    if name := source.get("codec"):
        codec = codecs.get(name)
        if not isinstance(sample[0], Spec):
            stored = [(r, p) for r, p in zip(codec.parts, sample, strict=True) if p is not None]
            roles, given = tuple(r for r, _ in stored), [p for _, p in stored]
            return made_of(op, written, roles, given)
        numbers = spec(sample[0].dtype, tuple(dice.choice([0, 1, 2, 5, 9]) for _ in range(axes)))
        given = [(numbers, elements(numbers, dice))]
        if op.name in ("dequantize", "recode"):
            own = args.from_.args if op.name == "recode" else dequantize.called(args).own
            try:
                specs = codec.encoded(own, numbers)
            except OpError:
                return [numbers, spec("float32", ())]
            parts = codec.reference_parts(own, given[0][1], numbers)
            there = [n for n, part in enumerate(parts) if part is not None]
            roles = tuple(codec.parts[n] for n in there)
            given = [(specs[n], parts[n]) for n in there]
    else:
        shapes = shapes_like(sample, args, axes, dice)
        for dtype in dice.sample(DTYPES, len(DTYPES)):
            specs = [spec(dtype, shape) for shape in shapes]
            try:
                if all(holdable(of) for of in infer(op, args, specs)):
                    break
            except OpError:
                continue
        given = [(of, elements(of, dice)) for of in specs]
        roles = roles_in(op, written, specs)
    found = made_of(op, written, roles, given)
    if not isinstance(found, Case):
        return found
    steps, made = list(found.steps), list(found.made.values())
    if roles == ("",) and len(made) == 1 and made[0][2] is None:
        for at, other in ((0, dice.choice(BETWEEN)), (len(steps) + 1, dice.choice(BETWEEN))):
            wider = [*steps[:at], other, *steps[at:]]
            try:
                longer = chained(wider, given)
            except OpError:
                continue
            if holdable(longer[0][0]):
                steps, made = wider, longer
    return Case(tuple(steps), found.given, dict(zip(found.made, made, strict=True)))


def made_of(
    op: Op, written: dict[str, Any], roles: tuple[str, ...], given: list[Any]
) -> Case | list[Spec]:
    """The case of one op on these inputs; where it refuses them, their specs."""
    try:
        made = chained([(op.name, written)], given, roles)
    except OpError:
        return [of for of, _ in given]
    out: tuple[str, ...] = ("",)
    if op.kind == "part":
        assert isinstance(op, ValueOp)
        out = op.roles(written.get("codec", ""))
        if op.settles(args := arguments(op, written), op.roles(getattr(args, "codec", ""))):
            out = op.makes(arguments(op, written), given[0][0])
    if op.kind == "exchange":
        args, specs = arguments(op, written), [of for of, _ in given]
        said = planned(op, args, roles, [array for _, array in given])
        out = op.settle(args, roles, specs, said).outputs
    return Case(
        ((op.name, written),),
        dict(zip(roles, given, strict=True)),
        dict(zip(out, made, strict=True)),
    )


def rule(number: int, steps: Any, given: Any, made: Any) -> dict[str, Any]:
    # a role that is missing is written all the same
    asked = [
        *given,
        *(
            role
            for op, written in steps
            if ops.get(op).kind == "join"
            for role in ops.get(op).roles(written.get("codec", ""))
        ),
    ]
    sides = [
        f"m{number}.{letter}"
        if list(roles) == [""]
        else {role: f"m{number}.{letter}.{role}" for role in roles}
        for letter, roles in (("in", dict.fromkeys(asked)), ("out", made))
    ]
    missing = [role for role in asked if role not in given]
    via = [{op: written} for op, written in steps]
    return {
        "name": f"r{number}",
        "from": sides[0],
        "to": sides[1],
        "via": via,
        **({"optional": missing} if missing else {}),
    }


def named(letter: str, number: int, role: str) -> str:
    return f"m{number}.{letter}.{role}".rstrip(".")


def tensor(of: Spec, array: Any) -> torch.Tensor:
    made = typed(np.array(array, carrier(of.dtype), order="C").reshape(-1), of.dtype).reshape(
        of.shape
    )
    assert (str(made.dtype), tuple(made.shape)) == (f"torch.{of.dtype}", of.shape)
    return made


def bits(one: torch.Tensor, of: Spec) -> np.ndarray:
    assert (str(one.dtype), tuple(one.shape)) == (f"torch.{of.dtype}", of.shape)
    if not one.numel():
        return np.zeros(of.shape, carrier(of.dtype))
    return (
        one.detach()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .view(carrier(of.dtype))
        .reshape(of.shape)
    )


def check(way: str, found: Any, cases: list[Case]) -> None:
    """Whether a state dict is what the twins make, and nothing else."""
    wanted = {
        named("out", n, role): (c, *one)
        for n, c in enumerate(cases)
        for role, one in c.made.items()
    }
    assert sorted(found) == sorted(wanted), way
    for key, (of_case, of, array, slack) in wanted.items():
        got = bits(found[key], of)
        said = [(role, str(s)) for role, (s, _) in of_case.given.items()]
        assert valuekit.near(got, np.asarray(array), of, slack), (
            f"{way}: {of_case.steps} of {said}: {key} is {got}, should be {array}"
        )


def through(folder: Path, cases: list[Case]) -> None:
    """Every way in and out."""
    state = {
        named("in", n, role): tensor(of, array)
        for n, c in enumerate(cases)
        for role, (of, array) in c.given.items()
    }
    written = (
        HEAD
        + "rules: "
        + json.dumps([rule(n, c.steps, c.given, c.made) for n, c in enumerate(cases)])
    )
    text = folder / "rule.yaml"
    text.write_text(written)
    how: dict[str, Any] = {"rules": [text], "allow": ALLOW}
    save_file(state, folder / "a.safetensors")
    torch.save(state, folder / "a.pt")
    wanted = {
        named("out", n, role): tensor(of, array)
        for n, c in enumerate(cases)
        for role, (of, array, _) in c.made.items()
    }

    check("a state dict", migrate.apply(state, **how), cases)
    files: list[tuple[str, Any, str]] = [
        ("safetensors to safetensors", folder / "a.safetensors", "b.safetensors"),
        ("safetensors to .pt", folder / "a.safetensors", "b.pt"),
        (".pt to .pt", folder / "a.pt", "c.pt"),
        (".pt to safetensors", folder / "a.pt", "c.safetensors"),
        ("a state dict to safetensors", state, "d.safetensors"),
        ("a state dict to .pt", state, "d.pt"),
    ]
    for way, source, name in files:
        migrate.apply(
            source,
            folder / name,
            **how,
            fsync=False,
            output_format="torch" if name.endswith(".pt") else "safetensors",
        )
        check(
            way,
            load_file(folder / name) if name.endswith("safetensors") else torch.load(folder / name),
            cases,
        )
    assert (
        migrate.verify(folder / "b.safetensors", source=folder / "a.safetensors", **how).to_json()[
            "differences"
        ]
        == []
    )
    assert (
        migrate.verify(folder / "c.pt", source=folder / "a.pt", **how).to_json()["differences"]
        == []
    )

    model = module(wanted, fill=0)
    migrate.attach(model, **how)
    model.load_state_dict(state)
    check("attach", model.state_dict(), cases)
    for source in (folder / "a.safetensors", folder / "a.pt", state):
        model = module(wanted, fill=0)
        migrate.load(model, source, **how)
        check("load", model.state_dict(), cases)


def every(seed: int, turn: int) -> tuple[list[Case], list[tuple[Any, Any, list[Spec]]]]:
    """A case of every sample, the number of axes going round from `turn` on; and what was refused,
    as (op, arguments, inputs).
    """
    dice, cases, refused = random.Random(seed), [], []
    for number, (op, written, sample) in enumerate(samples()):
        found = case(op, written, sample, (number + turn) % AXES, dice)
        if isinstance(found, Case):
            cases.append(found)
        else:
            refused.append((op, written, found))
    return cases, refused


def tried(folder: Path, seed: int) -> None:
    """Each sample once; over five seeds it meets every number of axes."""
    cases, refused = every(seed, seed % AXES)
    through(folder, cases)
    for op, written, specs in refused:
        (folder / "refused.yaml").write_text(
            HEAD + "rules: " + json.dumps([refused_rule(op, written, specs)])
        )
        state = {
            named("in", 0, role): tensor(of, elements(of, random.Random(seed)))
            for role, of in zip(roles_in(op, written, specs), specs, strict=True)
        }
        with pytest.raises(MigrateError):
            migrate.apply(state, rules=[folder / "refused.yaml"], allow=ALLOW)


def roles_in(op: Any, written: dict[str, Any], specs: list[Spec]) -> tuple[str, ...]:
    if op.kind == "exchange":
        return op.takes(arguments(op, written))[: len(specs)]
    return op.roles(written.get("codec", ""))[: len(specs)] if op.kind == "join" else ("",)


def refused_rule(op: Any, written: dict[str, Any], specs: list[Spec]) -> dict[str, Any]:
    out = op.roles(written.get("codec", "")) if op.kind == "part" else ("",)
    if op.kind == "exchange":
        spare = codecs.get(written["to"]["codec"]).optional
        out = tuple(role for role in op.gives(arguments(op, written)) if role not in spare)
    return rule(0, [(op.name, written)], roles_in(op, written, specs), out)


def test_every_number_of_axes_is_tried_on_every_op_that_is_elementwise():
    tried_on: dict[str, set[int]] = {}
    for turn in range(AXES):
        for of in every(0, turn)[0]:
            tried_on.setdefault(of.steps[-1][0], set()).update(
                len(s.shape) for s, _ in of.given.values()
            )
    for name in ("cast", "affine", "neg_exp"):
        assert tried_on[name] == set(range(AXES)), name


@pytest.mark.parametrize("seed", thorough(range(20)))
def test_every_op_and_codec_makes_what_its_twin_makes_through_every_way_in_and_out(tmp_path, seed):
    tried(tmp_path, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(20, 320))
def test_hundreds_more(tmp_path, seed):
    tried(tmp_path, seed)
