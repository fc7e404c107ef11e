"""Captures, patterns, tensors and chains of ops by chance: what the templates of `rule_sets` are
made of.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from naive_ops import BITS, FLOATS, INTEGERS, Tensor, encode_float, from_integers, unsigned

TILE = 4 << 20
PLAIN = ["a", "b1", "q_z", "Norm", "0x", "é"]
PATHS = ["", "model", "enc.a", "m.0.x"]
ALTERNATIVES = [["q", "k", "v"], ["w1", "w3"], ["up", "gate.z"], ["d", "c", "b", "a"], ["only"]]
RANKED = ("consolidated.safetensors", "consolidated.pth", "mp_rank.safetensors", "mp_rank.pt")


@dataclass
class RuleSet:
    """A rule file, the checkpoint's tensors by key (`key@1` of rank 1), and how it is stored and
    called.
    """

    number: int
    file: dict[str, Any]
    tensors: dict[str, Tensor]
    params: dict[str, Any] = field(default_factory=dict)
    allow: list[str] = field(default_factory=lambda: ["lossy", "drop"])
    form: str = "safetensors"
    shards: int = 1
    max_shard: int | None = None
    seen: Counter[str] = field(default_factory=Counter)


@dataclass
class Named:
    """A capture: how `from` writes it, its name, its values, and whether an op may join them."""

    written: str
    name: str
    values: list[Any]
    kind: str

    @property
    def ordered(self) -> bool:
        return self.kind == "alternatives" or (
            self.kind == "int"
            and self.values == list(range(self.values[0], self.values[0] + len(self.values)))
        )


class Parts:
    def __init__(self, number: int) -> None:
        self.dice = random.Random(f"rule set {number}")
        self.set = RuleSet(
            number,
            {
                "id": "demo/v2/random",
                "title": "A random change",
                "lineage": "demo",
                "edge": ["v1", "v2"],
            },
            {},
        )
        self.rules: list[dict[str, Any]] = []
        self.keep: list[str] = []
        self.declared: dict[str, dict[str, Any]] = {}
        self.ranks = 0
        self.large = False
        self.at = 0

    # --- small choices

    def chance(self, p: float) -> bool:
        return self.dice.random() < p

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.dice.choice(list(choices))

    def note(self, *words: str) -> None:
        self.set.seen.update(words)

    def number(self, value: int) -> Any:
        """An integer as an argument: itself, a param, or arithmetic over one."""
        if not self.chance(0.15):
            return value
        name = f"n{len(self.declared)}"
        self.declared[name] = {"type": "int"}
        self.note("param")
        way = self.pick(["plain", "product", "rest", "sum"])
        if way == "plain":
            self.set.params[name] = value
            return f"${name}"
        if way == "product":
            self.set.params[name] = value * 3
            return f"${name} // 3"
        if way == "rest":
            self.set.params[name] = value + 2
            return f"(${name} - 1) % 97 - 1" if 0 <= value + 1 < 97 else f"${name} - 2"
        self.set.params[name] = value - 1
        return f"${name} + 1"

    # --- tensors

    def shape(self) -> list[int]:
        ndim = self.pick([0, 1, 1, 2, 2, 2, 3, 4])
        return [self.pick([1, 2, 3, 4, 6] if self.chance(0.95) else [0]) for _ in range(ndim)]

    def large_shape(self, dtype: str) -> list[int]:
        elements = self.dice.randint(5 << 20, 13 << 20) * 8 // BITS[dtype]
        rows = self.pick([2, 6, 12, 300, 1024])
        middle = self.pick([1, 1, 3, 4])
        return [rows, *([middle] if middle > 1 else []), elements // rows // middle]

    def tensor(self, dtype: str, shape: Sequence[int], numbers: str = "") -> Tensor:
        """Random bits, or random numbers where an op computes: `floats`, or `integers`, which every
        dtype holds.
        """
        seed = np.random.default_rng(self.dice.getrandbits(64))
        if dtype == "bool":
            return Tensor(dtype, seed.integers(0, 2, shape, dtype=np.uint8))
        if numbers == "integers":
            values = seed.integers(0, 2 if dtype == "bool" else 9, shape)
            return Tensor(
                dtype,
                from_integers(values, dtype)
                if dtype in INTEGERS
                else encode_float(values.astype(float), dtype),
            )
        if numbers == "floats" and dtype in FLOATS:
            values = seed.normal(size=shape) * 2.0 ** seed.integers(
                -40, 40 if FLOATS[dtype][1] > 5 else 6, shape
            )
            bits = encode_float(np.asarray(values, np.float64), dtype)
            odd = self.odd_codes(dtype)
            where = seed.random(size=shape) < 0.1
            return Tensor(
                dtype,
                np.where(where, odd[seed.integers(0, len(odd), shape)], bits).astype(
                    unsigned(dtype)
                ),
            )
        return Tensor(
            dtype,
            seed.integers(0, 2 ** BITS[dtype] - 1, shape, dtype=np.uint64, endpoint=True).astype(
                unsigned(dtype)
            ),
        )

    @staticmethod
    def odd_codes(dtype: str) -> np.ndarray:
        """Zeros of both signs, the smallest and the largest numbers, and a quiet NaN of each
        sign.
        """
        bits, exponents, mantissa, infinities = FLOATS[dtype]
        sign = 1 << (bits - 1)
        top = (2**exponents - 1) << mantissa
        codes = [
            0,
            1,
            3,
            1 << mantissa,
            top - 1 if infinities else 0x7E,
            top | 1 << (mantissa - 1) if infinities else 0x7F,
        ]
        return np.array([code | s for code in codes for s in (0, sign)], dtype=np.uint64)

    def dtype(self) -> str:
        return self.pick(list(BITS) + ["float32", "bfloat16", "float16"] * 3)

    # --- patterns

    def captures(self, count: int, taken: Sequence[str] = ()) -> list[Named]:
        out: list[Named] = []
        names = [n for n in ("n", "w", "x", "e", "u", "y") if n not in taken]
        self.dice.shuffle(names)
        for name in names[:count]:
            if name in "ne":
                start, length = self.pick([0, 0, 0, 1]), self.pick([1, 2, 2, 3, 4, 11])
                values: list[Any] = (
                    list(range(start, start + length))
                    if self.chance(0.8)
                    else sorted(self.dice.sample(range(30), 3))
                )
                out.append(Named(f"{{{name}:int}}", name, values, "int"))
            elif name in "wu":
                values = list(self.pick(ALTERNATIVES))
                out.append(Named(f"{{{name}:{'|'.join(values)}}}", name, values, "alternatives"))
            else:
                out.append(
                    Named(
                        f"{{{name}}}", name, self.dice.sample(PLAIN, self.pick([1, 2, 3])), "plain"
                    )
                )
        self.note(*(c.kind for c in out))
        return out

    def pattern(self, prefix: str, captures: Sequence[Named]) -> tuple[str, list[Named]]:
        """A pattern with the captures in any order behind a path, and the path's captures beside
        them.
        """
        segments = [prefix]
        out = list(captures)
        for c in captures:
            way = self.pick(["alone", "alone", "before", "behind", "both"])
            around = {"alone": "{}", "before": "h{}", "behind": "{}_t", "both": "h-{}.s"}[way]
            segments.append(around.replace("{}", c.written))
        if self.chance(0.35):
            out.append(Named("{p...}", "p", self.dice.sample(PATHS, self.pick([1, 2])), "path"))
            segments.insert(0, "{p...}")
        if self.chance(0.3):
            segments.append("tail")
            out.append(
                Named(
                    "{k...}",
                    "k",
                    self.dice.sample(["", "weight", "a.b", "c.0.weight"], self.pick([1, 2])),
                    "path",
                )
            )
            segments.append("{k...}")
        else:
            segments.append(self.pick(["weight", "bias", "w{{0}}", "scale*"]))
        self.note(*(c.kind for c in out[len(captures) :]))
        return ".".join(segments), out

    @staticmethod
    def key(pattern: str, captures: Sequence[Named], values: Mapping[str, Any]) -> str:
        """A key made of a pattern by replacing what `from` writes."""
        marked = pattern.replace("{{", "\1").replace("}}", "\2")
        for c in captures:
            for text in (c.written, f"{{{c.name}}}"):
                if values[c.name] == "":
                    marked = marked.replace(f"{text}.", "").replace(f".{text}", "")
                marked = marked.replace(text, str(values[c.name]))
        return marked.replace("\1", "{").replace("\2", "}")

    def to_pattern(
        self, prefix: str, left: Sequence[Named], rule: dict[str, Any], made: Sequence[str]
    ) -> str:
        """A pattern of the captures that are left, in another order, with arithmetic and `map`."""
        segments = []
        for c in self.dice.sample(list(left), len(left)):
            text = f"{{{c.name}}}"
            if c.kind == "int" and self.chance(0.4):
                text = self.pick(
                    [
                        f"{{{c.name}+1}}",
                        f"{{2*{c.name}+1}}",
                        f"{{3*{c.name}}}",
                        f"{{{c.name}+2}}",
                        f"{{{c.name}-1}}" if self.chance(0.1) else f"{{{c.name}+7}}",
                    ]
                )
                self.note("arithmetic")
            elif self.chance(0.3):
                self.map(c, rule)
            segments.append(text)
            if c.kind == "path":
                segments.append(f"s{len(segments)}")
        segments += list(made)
        segments.insert(
            self.dice.randint(0, len(segments)) if not any(c.kind == "path" for c in left) else 0,
            prefix,
        )
        if not segments or segments[-1].endswith("}"):
            segments.append("w")
        return ".".join(segments)

    def map(self, c: Named, rule: dict[str, Any]) -> None:
        change: dict[Any, Any] = {}
        if c.kind == "alternatives":
            if self.chance(0.3) and len(c.values) > 1:
                change = {c.values[0]: c.values[1], c.values[1]: c.values[0]}
            else:
                change = {
                    value: f"t{i}{self.pick(['', '.z'])}"
                    for i, value in enumerate(c.values)
                    if self.chance(0.7)
                }
            if self.chance(0.05) and len(c.values) > 1:
                change[c.values[0]] = c.values[1]
        elif c.kind == "plain":
            change = {value: f"t{i}" for i, value in enumerate(c.values)}
            if self.chance(0.1):
                change.pop(c.values[0])
        elif c.kind == "int":
            change = dict(zip(c.values, self.dice.sample(range(50), len(c.values)), strict=True))
            if self.chance(0.1):
                change.pop(c.values[-1])
        else:
            change = {"a": "A", "a.b": self.pick(["AB", "x.y", None]), "weight": "W", "m.0": "zero"}
            change = {run: new for run, new in change.items() if self.chance(0.6)}
        if change:
            rule.setdefault("map", {})[c.name] = change
            self.note("map", f"map {c.kind}")

    # --- ops

    def ops(
        self, shape: list[int], dtype: str, captures: list[Named], most: int, numbers: str
    ) -> tuple[list[dict[str, Any]], list[Named], list[str], dict[str, Any]]:
        """Ops for tensors of this shape: (ops, captures that are left, captures that `to` types,
        what the tensors must be).
        """
        out: list[dict[str, Any]] = []
        left, made = list(captures), []
        need: dict[str, Any] = {}
        names = iter(["r", "s", "t", "z"])
        padded: dict[str, Any] | None = None
        for step in range(most):
            ndim = len(shape)
            dim = self.dice.randrange(ndim) if ndim else 0
            sign = (lambda d, n: d - n) if self.chance(0.3) else (lambda d, n: d)
            joinable = [c for c in left if c.ordered]
            choices = ["unsqueeze", "reshape", "copy"]
            choices += ["stack", "stack", "concat", "concat", "concat"] if joinable else []
            choices += ["same", "same"] if joinable and not out else []
            if ndim:
                choices += [
                    "flip",
                    "roll",
                    "slice",
                    "pad",
                    "rearrange",
                    "split",
                    "split",
                    "transpose",
                    "permute",
                ]
                choices += ["unbind"] if 1 <= shape[dim] <= 4 else []
                choices += ["squeeze"] if 1 in shape else []
            if numbers == "floats":
                choices += [
                    "cast",
                    "cast",
                    *(["affine"] if BITS[dtype] > 8 or self.chance(0.05) else []),
                ]
            if numbers == "integers":
                choices += ["cast", "cast", "cast"]
            op = self.pick(choices)
            # what nothing needs of a computed tensor is not computed, and so not refused either
            if op == "slice" and padded is None and (numbers or self.chance(0.6)):
                op = "pad"
            if padded is not None and self.chance(0.5):
                op = "slice"
            arguments: dict[str, Any] = {}
            if op in ("stack", "concat", "same"):
                if op == "concat" and not ndim:
                    op = "stack"
                c = self.pick(joinable)
                left.remove(c)
                arguments = {"over": c.name}
                if c.kind == "int" and c.values[0]:
                    arguments["start"] = self.number(c.values[0])
                if self.chance(0.6):
                    arguments["count"] = self.number(len(c.values))
                if op == "stack":
                    at = self.dice.randint(0, ndim)
                    arguments["dim"] = sign(at, ndim + 1)
                    shape.insert(at, len(c.values))
                elif op == "concat":
                    arguments["dim"] = self.number(sign(dim, ndim))
                    sizes = [shape[dim]] * len(c.values)
                    if not out and not self.large and self.chance(0.5):
                        sizes = [self.pick([0, 1, 2, 3, 5]) for _ in sizes]
                        need["lengths"] = (c.name, dim, dict(zip(c.values, sizes, strict=True)))
                        arguments["sizes"] = sizes
                    elif self.chance(0.3):
                        arguments["sizes"] = sizes
                    if "sizes" in arguments and self.chance(
                        0.4 if c.kind == "alternatives" else 0.03
                    ):
                        arguments["sizes"] = dict(zip(c.values, sizes, strict=True))
                    shape[dim] = sum(sizes)
                else:
                    need["equal over"] = c.name
            elif op in ("unbind", "split", "copy"):
                into = next(names, None)
                if into is None or len(made) > 1:
                    continue
                arguments = {"into": into}
                if op == "unbind":
                    count = shape.pop(dim)
                    arguments["dim"] = sign(dim, ndim)
                elif op == "split":
                    count = self.pick([k for k in (1, 2, 3, 4) if shape[dim] % k == 0])
                    arguments["dim"] = sign(dim, ndim)
                    if self.chance(0.25):
                        sizes = (
                            [shape[dim] - 0, 0]
                            if self.chance(0.2)
                            else [shape[dim] // count] * count
                        )
                        count = len(sizes)
                        arguments["sizes"] = sizes
                        shape[dim] = sizes[0]
                        if len(set(sizes)) > 1:
                            most = 0
                    else:
                        shape[dim] //= count
                else:
                    count = self.pick([1, 2, 3])
                    op = self.pick(["copy", "tie"])
                listed = [f"{into}{letter}" for letter in "cabd"][:count]
                if self.chance(0.5) and count:
                    made.append(f"{{{into}:{'|'.join(listed)}}}")
                else:
                    made.append(f"{{{into}:int}}")
                    start = self.pick([0, 0, 1])
                    if start:
                        arguments["start"] = start
                    if "sizes" not in arguments and (op != "unbind" or self.chance(0.5)):
                        arguments["count"] = self.number(count)
            elif op == "transpose":
                one, other = self.dice.randrange(ndim), self.dice.randrange(ndim)
                arguments = {"dims": [sign(one, ndim), other]}
                if one == other:
                    continue
                shape[one], shape[other] = shape[other], shape[one]
            elif op == "permute":
                dims = self.dice.sample(range(ndim), ndim)
                arguments = {"dims": [sign(d, ndim) for d in dims]}
                shape[:] = [shape[d] for d in dims]
            elif op == "flip":
                arguments = {"dim": sign(dim, ndim)}
            elif op == "roll":
                arguments = {"dim": sign(dim, ndim), "shift": self.number(self.pick([1, -1, 2, 5]))}
            elif op == "squeeze":
                at = shape.index(1)
                arguments = {"dim": sign(at, ndim)}
                shape.pop(at)
            elif op == "unsqueeze":
                at = self.dice.randint(0, ndim)
                arguments = {"dim": sign(at, ndim + 1)}
                shape.insert(at, 1)
            elif op == "reshape":
                new = self.other_shape(shape)
                arguments = {"to": list(new)}
                if self.chance(0.7):
                    arguments["from"] = list(shape)
                    if shape and 0 not in shape and self.chance(0.3):
                        arguments["from"][dim] = -1
                if new and 0 not in shape and self.chance(0.3):
                    arguments["to"][self.dice.randrange(len(new))] = -1
                shape[:] = new
            elif op == "rearrange":
                arguments = self.rearrangement(shape)
            elif op == "pad":
                start, behind = self.pick([0, 0, 1]), self.pick([0, 1, 2])
                arguments = {"dim": sign(dim, ndim), **({"start": start} if start else {})}
                before, size = shape[dim], shape[dim] + start + behind
                if self.chance(0.3):
                    unit = self.pick([2, 4, 5])
                    arguments["multiple_of"], size = (
                        self.number(unit),
                        -(-(before + start) // unit) * unit,
                    )
                else:
                    arguments["size"] = self.number(size)
                if self.chance(0.6):
                    arguments["of"] = self.number(before)
                value = self.pick([0, 0, 1])
                if value:
                    arguments["value"] = value
                shape[dim] = size
                out.append({op: arguments})
                self.note(op)
                padded = {
                    "dim": dim,
                    "start": start,
                    "stop": start + before,
                    "of": size,
                    "value": value,
                }
                continue
            elif op == "slice":
                if padded is not None:
                    dim, arguments = padded["dim"], dict(padded)
                    shape[dim] = padded["stop"] - padded["start"]
                    if self.chance(0.1):
                        arguments["value"] = 2
                else:
                    start = self.dice.randint(0, shape[dim])
                    stop = self.dice.randint(start, shape[dim])
                    arguments = {"dim": sign(dim, ndim), "start": start, "stop": stop}
                    if self.chance(0.4):
                        arguments["of"] = shape[dim]
                    shape[dim] = stop - start
            elif op == "cast":
                to = self.pick(
                    [
                        d
                        for d in (FLOATS if numbers == "floats" or self.chance(0.5) else INTEGERS)
                        if d not in (dtype, "bool")
                    ]
                )
                if numbers == "floats" and not FLOATS[to][3]:
                    to = self.pick(["bfloat16", "float32", "float16"])
                arguments = {"to": to}
                if self.chance(0.6):
                    arguments["from"] = dtype
                if self.chance(0.1):
                    arguments["exact"] = True
                dtype = to
            elif op == "affine":
                arguments = self.pick(
                    [
                        {"mul": -1},
                        {"mul": 2},
                        {"mul": 0.5},
                        {"mul": -4, "add": 1},
                        {"add": 0.25},
                        {"mul": 0.1},
                        {"mul": 0.5, "exact": True},
                    ]
                )
                arguments = dict(arguments)
            if op in ("flip", "roll", "affine") and left and self.chance(0.25):
                c = self.pick(left)
                if c.kind != "path":
                    arguments["only"] = {
                        c.name: self.dice.sample(c.values, self.dice.randint(1, len(c.values)))
                    }
                    self.note("only")
            padded = None
            out.append({op: arguments})
            self.note(op)
            if np.prod(shape, dtype=np.int64) > 4000 and not self.large:
                break
        return out, left, made, need

    def other_shape(self, shape: Sequence[int]) -> list[int]:
        size = int(np.prod(shape, dtype=np.int64))
        if size == 0:
            return self.pick([[0], [0, 2], list(shape), [3, 0]])
        out = []
        while size > 1 and len(out) < 3 and self.chance(0.8):
            out.append(self.pick([d for d in (1, 2, 3, 4, 6, 12) if size % d == 0]))
            size //= out[-1]
        return [*out, size] if size > 1 or self.chance(0.7) else out

    def rearrangement(self, shape: list[int]) -> dict[str, Any]:
        letters = iter("abcdefgh")
        groups: list[list[str]] = []
        lengths: dict[str, int] = {}
        told: dict[str, Any] = {}
        rest = None
        if len(shape) > 1 and self.chance(0.3):
            rest = self.dice.randint(1, len(shape))
        for size in shape[:rest]:
            if size == 1 and self.chance(0.5):
                groups.append([])
                continue
            factor = self.pick([d for d in (1, 2, 3, 4) if size and size % d == 0] or [0])
            if factor > 1 and self.chance(0.7):
                one, two = next(letters), next(letters)
                lengths |= {one: factor, two: size // factor}
                told[one] = self.number(factor)
                if self.chance(0.4):
                    told[two] = size // factor
                groups.append([one, two])
            else:
                name = next(letters)
                lengths[name] = size
                if self.chance(0.2):
                    told[name] = size
                groups.append([name])
        names = [name for group in groups for name in group]
        self.dice.shuffle(names)
        after: list[list[str]] = []
        for name in names:
            if after and self.chance(0.4):
                after[-1].append(name)
            else:
                after.append([name])
        if self.chance(0.2):
            after.insert(self.dice.randint(0, len(after)), [])
        new = [int(np.prod([lengths[name] for name in group], dtype=np.int64)) for group in after]

        def say(side: Sequence[list[str]]) -> str:
            words = (
                group[0]
                if len(group) == 1
                else f"({' '.join(group)})"
                if group
                else self.pick(["1", "()"])
                for group in side
            )
            return " ".join(words)

        left, right = say(groups), say(after)
        if rest is not None:
            left, right = f"{left} ...", f"{right} ..." if self.chance(0.5) else f"... {right}"
            others = shape[rest:]
            new = [*new, *others] if right.endswith("...") else [*others, *new]
        shape[:] = new
        return {"pattern": f"{left} -> {right}", **({"axes": told} if told else {})}
