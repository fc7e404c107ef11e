"""An exhaustive matcher and a generator of patterns, in other terms than the ones under test.

A pattern is a list of pieces: a string of literal text, or (kind, name, values). A reading is found
by trying every length for every piece; paths are tried present and absent by rewriting the text
around them.
"""

from __future__ import annotations

import random
from itertools import product

WORDS = [
    "x",
    "y",
    "0",
    "10",
    "01",
    "x_y",
    "x_y_x",
    "w3",
    "w10",
    "z",
    "7",
    "a.b",
    "",
    "²",
    "x@1",
    "norm2",
]


def text_of(pieces):
    out = []
    for piece in pieces:
        if isinstance(piece, str):
            out.append(piece.replace("{", "{{").replace("}", "}}"))
            continue
        kind, name, values = piece
        out.append(
            {"plain": f"{{{name}}}", "int": f"{{{name}:int}}", "path": f"{{{name}...}}"}.get(kind)
            or f"{{{name}:{'|'.join(values)}}}"
        )
    return "".join(out)


def readings(pieces, key):
    """All readings, as a set of tuples of values in order of first occurrence."""
    found = set()
    names = list(dict.fromkeys(p[1] for p in pieces if not isinstance(p, str)))
    paths = [i for i, p in enumerate(pieces) if not isinstance(p, str) and p[0] == "path"]
    for present in product((True, False), repeat=len(paths)):
        flat = list(pieces)
        for i, there in zip(paths, present, strict=True):
            if there:
                continue
            flat[i] = ("absent", pieces[i][1], ())
            if i + 1 < len(flat) and isinstance(flat[i + 1], str) and flat[i + 1].startswith("."):
                flat[i + 1] = flat[i + 1][1:]
            elif i and isinstance(flat[i - 1], str):
                flat[i - 1] = flat[i - 1][:-1]
        for values in _ways(flat, key, 0):
            if all(
                values[a] == values[b]
                for a in range(len(values))
                for b in range(a)
                if values[a][0] == values[b][0]
            ):
                read = dict(values)
                found.add(tuple(read[name] for name in names))
    return found


def _ways(pieces, key, at):
    if not pieces:
        if at == len(key):
            yield []
        return
    piece, rest = pieces[0], pieces[1:]
    if isinstance(piece, str):
        if key[at : at + len(piece)] == piece:
            yield from _ways(rest, key, at + len(piece))
        return
    kind, name, values = piece
    for end in range(at, len(key) + 1):
        part = key[at:end]
        value = part
        if kind == "absent":
            fits = part == ""
        elif kind == "path":
            fits = part != ""
        elif kind == "plain":
            fits = part != "" and "." not in part
        elif kind == "int":
            digits = "0123456789"
            around = key[max(0, at - 1) : at] + key[end : end + 1]
            fits = (
                part != ""
                and all(c in digits for c in part)
                and str(int(part)) == part
                and not any(c in digits for c in around)
            )
            value = int(part) if fits else None
        else:
            fits = part in values
        if fits:
            for more in _ways(rest, key, end):
                yield [(name, value), *more]


def random_pieces(rng: random.Random, repeat=False):
    """Pieces of a pattern that may well be refused when parsed; the caller skips those."""
    names = iter("abcdefghijklmnopq")
    segments = []
    for _ in range(rng.randint(1, 5)):
        form = rng.randrange(9)
        name = next(names)
        if form <= 1:
            segments.append([("path", name, ())])
        elif form == 2:
            segments.append([rng.choice(["x", "y", "0", "z", "x_y"])])
        elif form == 3:
            segments.append([("plain", name, ())])
        elif form == 4:
            segments.append([("int", name, ())])
        elif form == 5:
            segments.append(
                [("enum", name, tuple(rng.sample(["x", "y", "x_y", "a.b", "y_x", "7", "norm"], 3)))]
            )
        elif form == 6:
            segments.append([("plain", name, ()), "_", ("plain", next(names), ())])
        elif form == 7:
            segments.append([rng.choice(["w", "x", "norm"]), ("int", name, ())])
        else:
            segments.append(
                [
                    ("enum", name, ("x", "norm", "x_")),
                    (rng.choice(["int", "plain"]), next(names), ()),
                ]
            )
    pieces = []
    for segment in segments:
        if pieces:
            pieces.append(".")
        pieces += segment
    if rng.random() < 0.15:
        pieces += ["@", ("int", "rank", ())]
    if repeat:
        captures = [i for i, p in enumerate(pieces) if not isinstance(p, str)]
        if len(captures) > 1:
            first, second = sorted(rng.sample(captures, 2))
            kind = pieces[first][0]
            if kind != "path" and pieces[second][0] != "path":
                pieces[second] = pieces[first]
    joined = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def random_key(rng: random.Random):
    key = ".".join(
        rng.choice(WORDS[:12] if rng.random() < 0.9 else WORDS) for _ in range(rng.randint(1, 6))
    )
    return key + rng.choice(["", "", "", "", "@0", "@12"])


def likely_key(rng: random.Random, pieces):
    """A key that the pattern has a good chance to match."""
    out, values = [], {}
    for piece in pieces:
        if isinstance(piece, str):
            out.append(piece)
            continue
        kind, name, alternatives = piece
        choice = {
            "plain": lambda: rng.choice(["x", "y", "x_y", "0", "w3", "7"]),
            "int": lambda: str(rng.choice([0, 1, 2, 7, 10, 31])),
            "path": lambda: ".".join(
                rng.choice(["x", "y", "0", "x_y", "w3"]) for _ in range(rng.randint(1, 3))
            ),
        }.get(kind, lambda alternatives=alternatives: rng.choice(alternatives))()
        out.append(values.setdefault(name, choice))
    return "".join(out)
