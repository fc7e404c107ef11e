"""Random rule files over random checkpoints, and what they must do, said eagerly: numpy arrays, key
by key, no templates, no views.
"""

import json

import numpy as np
from hypothesis import strategies as st

from migrate.core.keys import parse

ALTERNATIVES = ("q", "k")


def document(rules, keep=(), edge=("v1", "v2")):
    """The rule file as text; JSON is YAML."""
    return json.dumps(
        {
            "id": "t/random",
            "title": "t",
            "lineage": "t",
            "edge": list(edge),
            "keep": list(keep),
            "rules": rules,
        }
    )


# ---------------------------------------------------------------------- the oracle


def naive(rules, checkpoint):
    """The checkpoint after the rules; every key is taken by the most special rule that matches it,
    keys under none stay.
    """
    out = {}
    taken = [[] for _ in rules]
    for key, array in checkpoint.items():
        found = None
        # by construction only rules called `broad` overlap others
        for number, rule in sorted(enumerate(rules), key=lambda pair: pair[1]["name"] == "broad"):
            values = _read(rule, key)
            if values is not None:
                found = number
                taken[number].append((values, array))
                break
        if found is None:
            out[key] = array
    for rule, items in zip(rules, taken, strict=True):
        for step in rule.get("via", ()):
            ((op, args),) = step.items()
            items = OPS[op](items, args)
        for values, array in items:
            key = _write(rule, values)
            assert key not in out
            out[key] = array
    return out


def _read(rule, key):
    text = rule["from"]
    for name, words in rule.get("map", {}).items():
        # a plain capture with a map takes exactly its keys
        text = text.replace("{" + name + "}", "{" + f"{name}:{'|'.join(words)}" + "}")
    pattern = parse(text)
    found = pattern.match(key)
    if found is None:
        return None
    values = dict(zip(pattern.captures, found, strict=True))
    for name, words in rule.get("map", {}).items():
        # alternatives that a map leaves out stay as they are
        if str(values[name]) not in words and pattern.types[name].kind != "enum":
            return None
    for name, test in rule.get("where", {}).items():
        if isinstance(test, dict) and not test.get("min", 0) <= values[name] <= test.get(
            "max", 10**9
        ):
            return None
        if isinstance(test, list) and values[name] not in test:
            return None
    return values


def _write(rule, values):
    values = dict(values)
    text = rule["to"].replace(":int", "").replace(":q|k", "")
    for name, words in rule.get("map", {}).items():
        values[name] = words.get(str(values[name]), values[name])
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
        for a in (1, 2, 3):
            for b in range(6):
                text = text.replace(
                    index(name, a, b), str(a * value + b) if isinstance(value, int) else "?"
                )
    return text.strip(".").replace("..", ".")


def index(name, a, b):
    """The index expression a*name+b in its shortest form, with braces."""
    return "{" + (f"{a}*" if a > 1 else "") + name + (f"+{b}" if b else "") + "}"


def _groups(items, over):
    groups = {}
    for values, array in items:
        rest = tuple((n, v) for n, v in values.items() if n != over)
        groups.setdefault(rest, []).append((values[over], array))
    for rest, members in groups.items():
        members.sort(key=lambda m: ALTERNATIVES.index(m[0]) if m[0] in ALTERNATIVES else m[0])
        yield dict(rest), [array for _, array in members]


def _joined(function):
    return lambda items, args: [
        (rest, function(arrays, args)) for rest, arrays in _groups(items, args["over"])
    ]


def _parted(function):
    def run(items, args):
        out = []
        for values, array in items:
            parts = function(array, args)
            names = (
                ALTERNATIVES
                if args["into"] == "w"
                else range(args.get("start", 0), args.get("start", 0) + len(parts))
            )
            out += [
                ({**values, args["into"]: name}, part)
                for name, part in zip(names, parts, strict=True)
            ]
        return out

    return run


def _each(function):
    def run(items, args):
        only = args.get("only", {})
        return [
            (v, function(a, args) if all(v[n] in allowed for n, allowed in only.items()) else a)
            for v, a in items
        ]

    return run


def _split(array, args):
    if "sizes" in args:
        sizes = args["sizes"]
        sizes = [sizes[w] for w in ALTERNATIVES] if isinstance(sizes, dict) else sizes
        return np.split(array, np.cumsum(sizes)[:-1], args["dim"])
    return np.split(array, args.get("count", 2), args["dim"])


def _pad(array, args):
    width = [(0, 0)] * array.ndim
    width[args["dim"]] = (0, args["size"] - args["of"])
    return np.pad(array, width, constant_values=args["value"])


OPS = {
    "stack": _joined(lambda arrays, args: np.stack(arrays, args["dim"])),
    "concat": _joined(lambda arrays, args: np.concatenate(arrays, args["dim"])),
    "unbind": _parted(
        lambda array, args: [
            np.take(array, i, args["dim"]) for i in range(array.shape[args["dim"]])
        ]
    ),
    "split": _parted(_split),
    "transpose": _each(lambda a, args: a.swapaxes(*args["dims"])),
    "permute": _each(lambda a, args: a.transpose(args["dims"])),
    "flip": _each(lambda a, args: np.flip(a, args["dim"])),
    "roll": _each(lambda a, args: np.roll(a, args["shift"], args["dim"])),
    "unsqueeze": _each(lambda a, args: np.expand_dims(a, args["dim"])),
    "reshape": _each(lambda a, args: a.reshape(args["to"])),
    "rearrange": _each(
        lambda a, args: (
            a.reshape(args["axes"]["x"], -1, *a.shape[1:]).swapaxes(0, 1).reshape(-1, *a.shape[1:])
        )
    ),
    "pad": _each(_pad),
}


# ---------------------------------------------------------------------- random rules


@st.composite
def axis_ops(draw, shape, most=2):
    """(steps, shape after them) for tensors of `shape`."""
    steps = []
    for _ in range(draw(st.integers(0, most))):
        dim = draw(st.integers(0, len(shape) - 1))
        kind = draw(
            st.sampled_from(
                ["transpose", "permute", "flip", "roll", "unsqueeze", "reshape", "rearrange", "pad"]
            )
        )
        if kind == "transpose":
            other = draw(
                st.integers(0, len(shape) - 1).filter(
                    lambda d, dim=dim: d != dim or len(shape) == 1
                )
            )
            if other == dim:
                continue
            after = list(shape)
            after[dim], after[other] = after[other], after[dim]
            steps.append({kind: {"dims": [dim, other]}})
            shape = tuple(after)
        elif kind == "permute":
            dims = draw(st.permutations(range(len(shape))))
            steps.append({kind: {"dims": list(dims)}})
            shape = tuple(shape[d] for d in dims)
        elif kind == "flip":
            steps.append({kind: {"dim": dim}})
        elif kind == "roll":
            steps.append({kind: {"dim": dim, "shift": draw(st.integers(-2, 2))}})
        elif kind == "unsqueeze" and len(shape) < 4:
            steps.append({kind: {"dim": dim}})
            shape = (*shape[:dim], 1, *shape[dim:])
        elif kind == "reshape":
            flat = (int(np.prod(shape)),)
            steps.append({kind: {"from": list(shape), "to": list(flat)}})
            shape = flat
        elif kind == "rearrange":
            x = draw(st.sampled_from([d for d in range(1, shape[0] + 1) if shape[0] % d == 0]))
            steps.append({kind: {"pattern": "(x y) ... -> (y x) ...", "axes": {"x": x}}})
        elif kind == "pad":
            size = shape[dim] + draw(st.integers(0, 2))
            steps.append({kind: {"dim": dim, "size": size, "of": shape[dim], "value": 0}})
            shape = (*shape[:dim], size, *shape[dim + 1 :])
    return steps, shape


class Filler:
    """Arrays in which every element of a checkpoint is another number."""

    def __init__(self):
        self.next = 1

    def __call__(self, shape):
        size = int(np.prod(shape))
        out = np.arange(self.next, self.next + size, dtype=np.float32).reshape(shape)
        self.next += size
        return out


shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


@st.composite
def subtree(draw, n, fill):
    """(rule, checkpoint) below the prefix `s{n}`, written below `t{n}`."""
    s, t = f"s{n}", f"t{n}"
    shape = draw(shapes)
    kind = draw(
        st.sampled_from(["path", "plain map", "int map", "part of a map", "index", "join", "part"])
    )
    name = f"{kind} {n}"
    if kind == "path":
        steps, _ = draw(axis_ops(shape))
        paths = draw(
            st.sets(
                st.sampled_from(["", "a", "a.b", "b.a", "0.a", "1.a", "a.12.c", "c"]), min_size=1
            )
        )
        rule = {"name": name, "from": s + ".{k...}.w", "to": t + ".{k}.v", "via": steps}
        return rule, {".".join(x for x in (s, p, "w") if x): fill(shape) for p in paths}
    if kind == "plain map":
        steps, _ = draw(axis_ops(shape))
        rule = {
            "name": name,
            "from": s + ".{m}.w",
            "to": t + ".{m}",
            "via": steps,
            "map": {"m": {"a": "b", "b": "x.y", "c.d": "a"}},
        }
        return rule, {
            f"{s}.{m}.w": fill(shape)
            for m in draw(st.sets(st.sampled_from(["a", "b", "c.d"]), min_size=1))
        }
    if kind == "part of a map":
        steps, _ = draw(axis_ops(shape))
        words = draw(
            st.sampled_from(
                [{"a": "x"}, {"a": "b", "b": "a"}, {"c.d": "y.z", "b": "0"}, {"a": "a", "b": "c"}]
            )
        )
        rule = {
            "name": name,
            "from": s + ".{m:a|b|c.d}.w",
            "to": t + ".{m}",
            "via": steps,
            "map": {"m": words},
        }
        return rule, {
            f"{s}.{m}.w": fill(shape)
            for m in draw(st.sets(st.sampled_from(["a", "b", "c.d"]), min_size=1))
        }
    if kind == "int map":
        rule = {
            "name": name,
            "from": s + ".{i:int}",
            "to": t + ".{i}",
            "map": {"i": {"0": "7", "3": "0", "12": "last"}},
        }
        return rule, {
            f"{s}.{i}": fill(shape) for i in draw(st.sets(st.sampled_from([0, 3, 12]), min_size=1))
        }
    if kind == "index":
        a, b, low = draw(st.integers(1, 3)), draw(st.integers(0, 5)), draw(st.integers(0, 2))
        rule = {
            "name": name,
            "from": s + ".{i:int}.w",
            "to": f"{t}.{index('i', a, b)}.w",
            "where": {"i": {"min": low}},
        }
        return rule, {
            f"{s}.{i}.w": fill(shape) for i in draw(st.sets(st.integers(0, 11), min_size=1)) | {low}
        }
    experts, start = draw(st.integers(1, 12)), draw(st.integers(0, 2))
    outer = draw(st.sampled_from(["e", "w"]))
    order = [outer, "w" if outer == "e" else "e"]
    layers = draw(st.sets(st.sampled_from(["0", "1", "10", "x"]), min_size=1, max_size=2))
    if kind == "join":
        steps = []
        if draw(st.booleans()):
            steps.append(
                {"flip": {"dim": draw(st.integers(0, len(shape) - 1)), "only": {"w": ["q"]}}}
            )
        at = shape
        for over in order:
            count = experts if over == "e" else 2
            dim = draw(st.integers(0, len(at) - 1))
            args = {"over": over, "dim": dim} | (
                {"start": start, "count": experts} if over == "e" else {}
            )
            if draw(st.booleans()):
                steps.append({"stack": args})
                at = (*at[:dim], count, *at[dim:])
            else:
                steps.append({"concat": args})
                at = (*at[:dim], at[dim] * count, *at[dim + 1 :])
            more, at = draw(axis_ops(at, 1))
            steps += more
        rule = {"name": name, "from": s + ".{p}.{e:int}.{w:q|k}", "to": t + ".{p}", "via": steps}
        keys = draw(
            st.permutations(
                [
                    f"{s}.{p}.{e}.{w}"
                    for p in sorted(layers)
                    for e in range(start, start + experts)
                    for w in "qk"
                ]
            )
        )
        return rule, {key: fill(shape) for key in keys}
    steps, at = [], (experts, *shape)
    for into in order:
        count = experts if into == "e" else 2
        dim = draw(st.integers(0, len(at) - 1))
        args = {"into": into, "dim": dim} | ({"start": start} if into == "e" else {})
        if into == "e" and at[dim] == experts and len(at) > 1:
            steps.append({"unbind": args})
            at = (*at[:dim], *at[dim + 1 :])
        elif at[dim] % count == 0:
            steps.append({"split": args | ({"count": count} if into == "e" else {})})
            at = (*at[:dim], at[dim] // count, *at[dim + 1 :])
        elif into == "w":
            sizes = {"q": at[dim] // 2, "k": at[dim] - at[dim] // 2}
            steps.append({"split": args | {"sizes": sizes}})
            if order[0] == "w":
                # parts of two shapes: one more split would need two arguments
                return None, {}
        else:
            return None, {}
    rule = {"name": name, "from": s + ".{p}.fused", "to": t + ".{p}.{e:int}.{w:q|k}", "via": steps}
    return rule, {f"{s}.{p}.fused": fill((experts, *shape)) for p in sorted(layers)}


@st.composite
def edges(draw):
    """(rules, checkpoint): one rule for each of some subtrees, perhaps one that takes all the rest,
    and keys beside.
    """
    fill, rules, checkpoint = Filler(), [], {}
    for n in range(draw(st.integers(1, 4))):
        rule, part = draw(subtree(n, fill))
        if rule is not None:
            rules.append(rule)
            checkpoint.update(part)
    if draw(st.booleans()):
        rules.insert(0, {"name": "broad", "from": "{k...}", "to": "rest.{k}"})
        checkpoint["other.w"] = fill((2,))
    checkpoint |= {"z.w": fill((2, 2))}
    names = draw(st.permutations(sorted(checkpoint)))
    return rules, {name: checkpoint[name] for name in names}
