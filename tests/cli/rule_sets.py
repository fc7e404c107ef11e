"""Random rule sets with checkpoints that they take, by number: the same number makes the same set.

A set is one rule file and one checkpoint. It is built of templates, each with keys and rules of its
own prefix, so that most sets are accepted; a third is changed afterwards, and the witness says what
becomes of it."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from naive_ops import FLOATS, Tensor
from naive_rules import bare
from rule_parts import RANKED, TILE, Named, Parts, RuleSet


def rule_set(number: int) -> RuleSet:
    """Set number `number`."""
    return Maker(number).make()


class Maker(Parts):
    """A set of templates."""

    # --- templates

    def template(self, add: str) -> None:
        self.at += 1
        self.note(f"template {add}")
        getattr(self, f"add_{add}")(f"g{self.at}", f"o{self.at}")

    def rule(self, pattern: Any, **fields: Any) -> dict[str, Any]:
        rule = {"name": f"rule-{len(self.rules)}", "from": pattern, **fields}
        self.rules.append(rule)
        return rule

    def fill_keys(
        self,
        pattern: str,
        captures: Sequence[Named],
        dtype: str,
        shape: list[int],
        need: Mapping[str, Any],
        numbers: str,
    ) -> list[str]:
        keys = []
        equal: dict[tuple[Any, ...], Tensor] = {}
        for values in itertools.product(*(c.values for c in captures)):
            named = {c.name: value for c, value in zip(captures, values, strict=True)}
            size = list(shape)
            if "lengths" in need:
                name, dim, lengths = need["lengths"]
                size[dim] = lengths[named[name]]
            common = tuple((n, v) for n, v in named.items() if n != need.get("equal over"))
            tensor = equal.get(common) or self.tensor(dtype, size, numbers)
            if "equal over" in need:
                equal[common] = tensor
            key = self.key(pattern, captures, named)
            keys.append(key)
            self.set.tensors[key] = tensor
        return keys

    def add_general(self, prefix: str, other: str) -> None:
        """Any captures, any ops."""
        numbers = self.pick(["", "", "floats", "integers"])
        dtype = (
            self.pick([d for d in FLOATS if d != "float8_e4m3fn"])
            if numbers == "floats"
            else self.dtype()
        )
        large, self.large = self.large, False
        if large:
            dtype = self.pick(["float32", "bfloat16", "float64", "uint8"])
            numbers = "floats" if dtype != "uint8" and self.chance(0.3) else ""
        chosen = self.captures(self.pick([0, 1, 1, 2, 2, 3]))
        if large:
            chosen = chosen[:1]
            for c in chosen:
                c.values[2:] = [] if c.kind != "alternatives" else c.values[2:]
            chosen = [c for c in chosen if len(c.values) < 3]
        pattern, captures = self.pattern(prefix, chosen)
        if large:
            for c in captures:
                if c.kind == "path":
                    c.values[1:] = []
        shape = self.large_shape(dtype) if large else self.shape()
        base = list(shape)
        self.large = large
        via, left, made, need = self.ops(
            shape, dtype, captures, self.pick([0, 1, 1, 2, 2, 3, 4]), numbers
        )
        self.large = False
        rule = self.rule(pattern)
        if via:
            rule["via"] = via
        if made or len(left) < len(captures) or self.chance(0.85):
            rule["to"] = self.to_pattern(other, left, rule, made)
        else:
            rule["to"] = pattern
            for c in captures:
                rule["to"] = rule["to"].replace(c.written, f"{{{c.name}}}")
            rule.pop("map", None)
        if self.chance(0.1):
            rule["inverse"] = "skip"
        self.fill_keys(pattern, captures, dtype, base, need, numbers)

    def add_where(self, prefix: str, other: str) -> None:
        """One pattern, two rules that `where` tells apart, or one and `keep`."""
        pattern, captures = self.pattern(prefix, self.captures(2))
        c = self.pick([c for c in captures if c.kind != "path"])
        if c.kind == "int":
            limit = self.pick(c.values)
            one, two = self.pick(
                [
                    ({"max": limit}, {"min": self.number(limit + 1)}),
                    ({"multiple_of": 2}, {"multiple_of": 2, "remainder": 1}),
                    ({"max": limit}, {"max": limit + 2}),
                ]
            )
        else:
            some = self.dice.sample(c.values, self.dice.randint(1, len(c.values)))
            one, two = (
                some if len(some) > 1 else self.pick([some, some[0]]),
                [v for v in c.values if v not in some],
            )
            if self.chance(0.2):
                self.declared["listed"] = {"type": "list", "items": "str"}
                self.set.params["listed"] = list(some)
                one = self.pick(["$listed", ["$listed"]])
        self.note("where")
        shape, dtype = self.shape(), self.dtype()
        first = self.rule(pattern, where={c.name: one})
        if self.chance(0.5) and c.ordered:  # not all members of the group
            first["via"] = [{"stack": {"over": c.name}}]
            first["to"] = self.to_pattern(other, [d for d in captures if d is not c], first, [])
        else:
            first["to"] = self.to_pattern(other, captures, first, [])
        if two != [] and self.chance(0.7):
            second = self.rule(pattern, where={c.name: two}, optional=self.chance(0.7))
            second["to"] = self.to_pattern(f"{other}x", captures, second, [])
        else:
            self.keep.append(pattern)
        if self.chance(0.3):
            self.declared["flag"] = {"type": "bool", "optional": True}
            self.set.params["flag"] = self.pick([True, False, None])
            self.rules[-1].setdefault("where", {})["$flag"] = self.pick([True, False])
            self.note("param condition")
        if self.chance(0.5):
            self.keep.append(pattern)
        self.fill_keys(pattern, captures, dtype, shape, {}, "")

    def add_when(self, prefix: str, other: str) -> None:
        """Keys of one form and several dtypes or numbers of axes, told apart by `when`."""
        pattern, captures = self.pattern(prefix, self.captures(self.pick([1, 2])))
        keys = self.fill_keys(pattern, captures, "bfloat16", [2, 2], {}, "floats")
        for key in keys:
            if self.chance(0.5):
                self.set.tensors[key] = self.tensor(
                    *self.pick([("float32", [2, 2]), ("bfloat16", []), ("bfloat16", [3])]), "floats"
                )
        self.note("when")
        first = self.rule(
            pattern,
            when=self.pick(
                [{"dtype": "bfloat16"}, {"dtype": ["bfloat16"], "ndim": [0, 2]}, {"ndim": 2}]
            ),
            optional=True,
        )
        if self.chance(0.5):
            first["via"] = (
                [{"cast": {"to": "float32", "from": "bfloat16"}}]
                if "dtype" in first["when"]
                else [{"transpose": {"dims": [0, 1]}}]
            )
            self.note(*first["via"][0])
        elif self.chance(0.3) and any(c.ordered for c in captures):
            c = next(c for c in captures if c.ordered)
            first["via"] = [{"stack": {"over": c.name}}]
            captures = [d for d in captures if d is not c]
        first["to"] = self.to_pattern(other, captures, first, [])
        self.keep.append(pattern)

    def add_narrow(self, prefix: str, other: str) -> None:
        """A broad pattern and narrower ones, one of which may leave its keys where they are."""
        one = (
            self.captures(1, taken="xynew")[0]
            if self.chance(0.3)
            else Named("{x}", "x", ["q", "k", "norm", "a7", "7"], "plain")
        )
        broad = f"{prefix}.{one.written}.{{k...}}"
        tails = Named("{k...}", "k", ["weight", "a.b", ""], "path")
        rule = self.rule(broad)
        rule["to"] = self.to_pattern(other, [one, tails], rule, [])
        if "map" in rule and one.name in rule["map"]:
            del rule["map"][one.name]
        narrow = self.pick(
            [
                f"{prefix}.q.{{k...}}",
                f"{prefix}.{{w:q|k}}.{{k...}}",
                f"{prefix}.{{x}}.weight",
                f"{prefix}.a{{n:int}}.{{k...}}",
                f"{prefix}.{{n:int}}.{{k...}}",
                f"{prefix}.{{x}}.a.{{k...}}",
            ]
        )
        again = narrow.replace(":int", "").replace(":q|k", "").replace("...", "")
        self.rule(narrow, to=again if self.chance(0.3) else f"{other}n.{again}")
        if self.chance(0.3):
            third = self.pick(
                [
                    f"{prefix}.q.weight",
                    f"{prefix}.{{w:q|k}}.weight",
                    f"{prefix}.{{x}}.a.b",
                    f"{{p...}}.{prefix}.q.{{k...}}",
                ]
            )
            self.rule(
                third,
                to=f"{other}t.{third.replace(':q|k', '').replace('...', '')}",
                optional=self.chance(0.8),
            )
        self.note("narrower", "path", "plain")
        self.fill_keys(broad, [one, tails], self.dtype(), self.shape(), {}, "")

    def add_swap(self, prefix: str, other: str) -> None:
        """Names that change places."""
        self.rule(f"{prefix}.{{k...}}.one", to=f"{prefix}.{{k}}.two")
        self.rule(
            f"{prefix}.{{k...}}.two",
            to=f"{prefix}.{{k}}.one",
            via=[{"flip": {"dim": 0}}] if self.chance(0.3) else [],
        )
        if not self.rules[-1]["via"]:
            del self.rules[-1]["via"]
        for tail in ("one", "two"):
            self.fill_keys(
                f"{prefix}.{{k...}}.{tail}",
                [Named("{k...}", "k", ["a", "b.c"], "path")],
                self.dtype(),
                [3, *self.shape()][:3],
                {},
                "",
            )
        self.note("swap", "path", "flip")

    def add_source(self, prefix: str, other: str) -> None:
        """A rule that reads keys which stay or which another takes."""
        pattern, captures = self.pattern(prefix, self.captures(1))
        reading = self.rule(pattern, keep_source=True)
        if self.chance(0.4):
            dtype, shape = (
                self.pick(["float32", "int64", "bfloat16", "bool"]),
                self.pick([[], [2], [0], [2, 3]]),
            )
            reading["via"] = [
                {"fill": {"value": self.pick([0, 1]), "dtype": dtype, "shape": shape}}
            ]
            self.note("fill")
        reading["to"] = self.to_pattern(other, captures, reading, [])
        way = self.pick(["keep", "taken", "alone"])
        if way == "keep":
            self.keep.append(pattern)
        elif way == "taken":
            taking = self.rule(pattern)
            taking["to"] = self.to_pattern(f"{other}m", captures, taking, [])
        self.note("keep_source")
        self.fill_keys(pattern, captures, self.dtype(), self.shape(), {}, "")

    def add_exists(self, prefix: str, other: str) -> None:
        """Targets that may be there."""
        dtype, shape = self.dtype(), self.shape()
        sources = self.fill_keys(
            f"{prefix}.{{n:int}}.old",
            [Named("{n:int}", "n", [0, 1, 2], "int")],
            dtype,
            shape,
            {},
            "",
        )
        rule = self.rule(f"{prefix}.{{n:int}}.old", to=f"{other}.{{n}}.new", if_exists="keep")
        parts = self.chance(0.3)
        if parts:
            rule |= {"to": f"{other}.{{n}}.{{t:a|b}}", "via": [{"copy": {"into": "t"}}]}
            self.note("copy")
        if self.chance(0.2):
            rule["keep_source"] = True
        self.keep.append(f"{other}.{{k...}}")
        for number, source in enumerate(sources):
            for tail in ("a", "b") if parts else ("new",):
                if self.chance(0.5) or (
                    parts
                    and tail == "b"
                    and f"{other}.{number}.a" in self.set.tensors
                    and self.chance(0.8)
                ):
                    there = (
                        self.set.tensors[source] if self.chance(0.85) else self.tensor(dtype, shape)
                    )
                    self.set.tensors[f"{other}.{number}.{tail}"] = there
        self.note("if_exists", "int")

    def add_drop(self, prefix: str, other: str) -> None:
        pattern, captures = self.pattern(prefix, self.captures(1))
        self.rule(pattern, via=[{"drop": {"why": "the model computes it again"}}])
        self.note("drop")
        self.fill_keys(pattern, captures, self.dtype(), self.shape(), {}, "")
        if self.set.form.endswith(
            "pt"
        ):  # what holds no tensor any more is no dict of tensors to its readers
            self.keep.append(f"{prefix}stays")
            self.set.tensors[f"{prefix}stays"] = self.tensor("float32", [2])

    def add_roles(self, prefix: str, other: str) -> None:
        """Roles that stay roles, are joined, or are made."""
        shape, dtype = self.shape(), self.dtype()
        items = [
            Named("{k...}", "k", ["", "a", "b.c"], "path"),
            Named("{n:int}", "n", [0, 1], "int"),
        ]
        start = f"{prefix}.{{k...}}.s{{n:int}}"
        way = self.pick(["stay", "stay", "join", "make", "list", "flat"])
        self.note(f"roles {way}", "path", "int")
        if way == "make":
            into = f"{other}.{{n}}.s.{{k}}"
            length = 2 * self.pick([1, 2, 3])
            op = (
                {"split": {"into": "role", "dim": 0}}
                if self.chance(0.7)
                else {"copy": {"into": "role"}}
            )
            self.note(*op)
            self.rule(f"{start}.w", to={"up": f"{into}.up", "down": f"{into}.down"}, via=[op])
            self.fill_keys(f"{start}.w", items, dtype, [length, *shape[:2]], {}, "")
            return
        if way == "flat":
            self.rule(
                {"w": f"{prefix}.{{k...}}.w", "ema": f"ema{prefix}_{{k:flat}}"},
                to={"w": f"{other}.{{k}}.w", "ema": f"{other}ema.{{k}}.z"},
            )
            for path in ("a", "b.c"):
                self.set.tensors[f"{prefix}.{path}.w"] = self.tensor(dtype, shape)
                self.set.tensors[f"ema{prefix}_{path.replace('.', '')}"] = self.tensor(dtype, shape)
            return
        roles = ["b", "a"] if self.chance(0.5) else ["w", "b", "s"]
        before: Any = {role: f"{start}.{role}" for role in roles}
        if way == "list":
            before = list(before.values())
        rule = self.rule(before)
        if way == "stay":
            rule["to"] = {role: f"{other}.s{{n}}.{{k}}.{role}2" for role in roles}
            if self.chance(0.4):
                rule["via"] = [
                    self.pick(
                        [
                            {"unsqueeze": {"dim": 0, "only": {"role": [roles[0]]}}},
                            {"reshape": {"to": [-1]}},
                        ]
                    )
                ]
                self.note("only", *rule["via"][0])
            if self.chance(0.4):
                rule["optional"] = self.pick([[roles[1]], {"role": [roles[1]]}])
                self.note("optional roles")
        else:
            op = self.pick(["stack", "concat"] if shape else ["stack"])
            rule["via"] = [{op: {"over": "role", "dim": 0}}]
            rule["to"] = f"{other}.s{{n}}.{{k}}.joined"
            if self.chance(0.4):
                rule["via"].append({"stack": {"over": "n", "count": 2}})
                rule["to"] = f"{other}.{{k}}.joined"
            self.note(op)
        for role in roles:
            keys = self.fill_keys(f"{start}.{role}", items, dtype, shape, {}, "")
            if role == roles[1] and "optional" in rule and 0 not in shape:
                for key in keys:
                    if self.chance(0.4):
                        del self.set.tensors[key]

    def add_keep(self, prefix: str, other: str) -> None:
        pattern, captures = self.pattern(prefix, self.captures(self.pick([0, 1])))
        self.keep.append(pattern)
        if self.chance(0.3):
            self.rule(f"{prefix}zz.{{x}}", to=f"{other}.{{x}}", optional=True)
        self.note("keep", "optional")
        self.fill_keys(pattern, captures, self.dtype(), self.shape(), {}, "")

    def add_ranked(self, prefix: str, other: str) -> None:
        """Parts of one tensor in the files of several ranks: joined, cut, or each rank alone."""
        way = self.pick(["join", "join", "same", "alone", "stack alone"])
        dtype, shape = self.dtype(), self.shape() or [2]
        dim = self.dice.randrange(len(shape))
        self.note(f"ranked {way}")
        names = Named("{x}", "x", ["a", "b"], "plain")
        if way in ("join", "same"):
            op = {"concat": {"over": "r", "dim": dim}} if way == "join" else {"same": {"over": "r"}}
            if self.chance(0.8):
                op[next(iter(op))]["count"] = self.ranks
            self.note(*op)
            self.rule(f"{prefix}.{{x}}@{{r:int}}", to=f"{other}.{{x}}", via=[op])
        elif way == "alone":
            self.rule(f"{prefix}.{{x}}", to=f"{other}.{{x}}", via=[{"flip": {"dim": dim}}])
        else:
            names = Named("{x:a|b}", "x", ["a", "b"], "alternatives")
            self.rule(f"{prefix}.{{x:a|b}}", to=f"{other}", via=[{"stack": {"over": "x"}}])
            self.note("stack")
        for key in self.fill_keys(f"{prefix}.{names.written}", [names], dtype, shape, {}, ""):
            tensor = self.set.tensors.pop(key)
            for rank in range(self.ranks):
                self.set.tensors[f"{key}@{rank}"] = (
                    tensor if way == "same" else self.tensor(dtype, shape)
                )

    def add_cut(self, prefix: str, other: str) -> None:
        """One tensor that goes to the files of several ranks."""
        dtype = self.dtype()
        into = self.pick(["split", "copy", "tie", "unbind"])
        count = self.ranks or 2
        self.note(into, "cut into ranks")
        self.rule(
            f"{prefix}.{{x}}",
            to=f"{other}.{{x}}@{{r:int}}",
            via=[{into: {"into": "r", "count": count, **({"dim": 0} if into == "split" else {})}}],
        )
        self.fill_keys(
            f"{prefix}.{{x}}",
            [Named("{x}", "x", ["a", "b"], "plain")],
            dtype,
            [count if into == "unbind" else 2 * count, 3],
            {},
            "",
        )

    # --- the set

    def make(self) -> RuleSet:
        self.set.form = self.pick(
            [
                "safetensors",
                "safetensors",
                "shards",
                "shards",
                "pt",
                "nested pt",
                *RANKED[:2],
                *RANKED[2:],
            ]
        )
        if self.set.form in RANKED:
            self.ranks = self.pick([1, 2, 2, 3])
            self.note("ranks")
        self.large = self.chance(0.07)
        if self.large:
            self.template("general")
        kinds = ["general"] * 6 + [
            "where",
            "when",
            "narrow",
            "swap",
            "source",
            "exists",
            "drop",
            "roles",
            "roles",
            "keep",
        ]
        for _ in range(self.pick([1, 2, 2, 3, 4])):
            self.template(self.pick(kinds))
        if self.ranks:
            for _ in range(self.pick([1, 2])):
                self.template(self.pick(["ranked", "ranked", "ranked", "cut"]))
        elif self.chance(0.04):
            self.template("cut")
        if self.chance(0.33):
            self.mutate()
        if self.keep:
            self.set.file["keep"] = list(dict.fromkeys(self.keep))
        if self.declared:
            self.set.file["params"] = self.declared
        self.dice.shuffle(self.rules)
        self.set.file["rules"] = self.rules
        self.set.file = copy.deepcopy(self.set.file)
        if self.ranks:
            self.spread()
        self.set.shards = (
            min(self.pick([2, 3]), len(self.set.tensors)) if self.set.form == "shards" else 1
        )
        if self.set.form not in RANKED and self.set.form != "nested pt" and self.chance(0.4):
            most = max((t.bits.nbytes for t in self.set.tensors.values()), default=0)
            self.set.max_shard = self.pick([max(64, most // 2), max(300, most + 1000), 4096])
            self.note("several shards asked for")
        shapes = [t.shape for t in self.set.tensors.values()]
        self.note(
            *("scalar" for shape in shapes if shape == ()),
            *("empty tensor" for shape in shapes if 0 in shape),
        )
        self.note(
            *("several tiles" for t in self.set.tensors.values() if t.bits.nbytes > TILE),
            f"form {self.set.form}",
        )
        self.note(*(t.dtype for t in self.set.tensors.values()))
        return self.set

    def spread(self) -> None:
        """Keys without a rank: of a key that several files have a tensor each; and the names that
        the language sees.
        """
        out: dict[str, Tensor] = {}
        for key, tensor in self.set.tensors.items():
            name, rank = bare(key)
            if rank is None and not self.chance(0.5):
                for r in range(self.ranks):
                    out[f"{name}@{r}"] = (
                        tensor if r == 0 else Tensor(tensor.dtype, np.array(np.flip(tensor.bits)))
                    )
            else:
                out[f"{name}@{rank or 0}"] = tensor
        held = Counter(bare(key)[0] for key in out)
        self.set.tensors = {
            bare(key)[0] if key.endswith("@0") and held[bare(key)[0]] == 1 else key: tensor
            for key, tensor in out.items()
        }

    def mutate(self) -> None:
        """One change that may make the set wrong."""
        self.note("mutated")
        tensors, rules = self.set.tensors, self.rules
        way = self.pick(
            [
                "key gone",
                "key more",
                "renamed",
                "dtype",
                "shape",
                "rule twice",
                "count",
                "allow",
                "target",
                "number",
                "reading",
                "rule alone",
                "type",
            ]
        )
        key = self.pick(sorted(tensors)) if tensors else ""
        rule = self.pick(rules) if rules else None
        if way == "key gone" and len(tensors) > 1:
            del tensors[key]
        elif way == "key more" and key:
            tensors[f"{key}{self.pick(['9', '.more', 'x'])}"] = tensors[key]
        elif way == "renamed" and key:
            tensors[key.replace("a", "zz", 1) if "a" in key else f"zz.{key}"] = tensors.pop(key)
        elif way == "dtype" and key:
            tensors[key] = self.tensor("int16", tensors[key].shape, "integers")
        elif way == "shape" and key:
            tensors[key] = self.tensor(
                tensors[key].dtype, [*tensors[key].shape, 2][-3:], "integers"
            )
        elif way == "rule twice" and rule:
            rules.append({**copy.deepcopy(rule), "name": "twice"})
        elif way == "count" and rule:
            for op in rule.get("via", []):
                for arguments in op.values():
                    if "count" in arguments:
                        arguments["count"] = self.pick([1, 2, 3, 5])
        elif way == "allow":
            self.set.allow.remove(self.pick(["lossy", "drop"]))
        elif way == "target" and rule and isinstance(rule.get("to"), str):
            rule["to"] = self.pick([r["to"] for r in rules if isinstance(r.get("to"), str)])
        elif way == "number" and rule:
            for op in rule.get("via", []):
                for arguments in op.values():
                    if isinstance(arguments.get("dim"), int):
                        arguments["dim"] = self.pick([-5, -1, 0, 1, 4])
        elif way == "reading" and key:
            self.rule("{a}_{b}", to="two.{a}.{b}")
            tensors[self.pick(["x_y", "x_y_z"])] = tensors[key]
        elif way == "rule alone":
            self.rule("nothing.{k...}", to="something.{k}", optional=self.pick([False, True]))
        elif way == "type" and rule:
            for op in rule.get("via", []):
                for arguments in op.values():
                    if "from" in arguments and isinstance(arguments["from"], str):
                        arguments["from"] = "float16"
        self.note(f"mutation {way}")
