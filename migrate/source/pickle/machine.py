"""The one reader of pickle streams: a stack machine that makes inert nodes and imports, calls and
builds nothing.

It does what the unpickler's machine does, memo and frames included, so there is nothing to be
fooled about; what it cannot hold exactly it refuses. Three refusals carry the rest:

* A container that was read back from the memo never changes afterwards. Genuine streams finish a
  container before they use it again, except for values that contain themselves. So every value is
  complete when something takes it, and there are no cycles.
* POP, POP_MARK and DUP are refused: supported writers need them only for tuples that contain
  themselves.
* Nothing made from composites of the stream is hashed, compared or printed: a tuple as key becomes
  flat text first.

One loop over all opcodes, the frequent ones first: a function per opcode would cost twice the time.
Opcodes that are rare or refused, and the reason why a stream that ends too early does, have
functions of their own. `at` is the start of the opcode in hand until its branch ends, so an error
knows its offset for nothing. A MARK starts a new stack, so that no opcode can reach below it. A
frame is a buffer of its own, so that no opcode can reach out of it. Counts are compared with their
limits every few thousand opcodes and at the end.
"""

from __future__ import annotations

import struct
from itertools import repeat
from typing import Any, Final

from ...core.errors import fail, printable
from ..jsontext import collector_paused
from .nodes import (
    ABSENT,
    METHOD,
    Call,
    Dict,
    EndedError,
    Global,
    Limits,
    Persistent,
    Set,
    WrongError,
    forms_of,
    kind_of,
    measure,
)

# the opcodes that are refused by name, and why they are not missed
_OLD = "an opcode of protocols 0 and 1, which no supported writer uses"
_REFUSED = {
    **dict.fromkeys(
        (
            "INT",
            "LONG",
            "FLOAT",
            "STRING",
            "UNICODE",
            "GET",
            "PUT",
            "DICT",
            "LIST",
            "INST",
            "OBJ",
            "PERSID",
        ),
        _OLD,
    ),
    **dict.fromkeys(
        ("POP", "POP_MARK", "DUP"),
        "supported writers use it only for values that contain themselves",
    ),
    **dict.fromkeys(
        ("EXT1", "EXT2", "EXT4"),
        "names from the registry of the reading process are not known here",
    ),
    **dict.fromkeys(("NEXT_BUFFER", "READONLY_BUFFER"), "its data lies outside the stream"),
}
_CODES = {
    "INT": "I", "LONG": "L", "FLOAT": "F", "STRING": "S", "UNICODE": "V", "GET": "g", "PUT": "p",
    "DICT": "d", "LIST": "l",
    "INST": "i", "OBJ": "o", "PERSID": "P", "POP": "0", "POP_MARK": "1", "DUP": "2", "EXT1": "\x82",
    "EXT2": "\x83", "EXT4": "\x84",
    "NEXT_BUFFER": "\x97", "READONLY_BUFFER": "\x98",
}  # fmt: skip
_BY_CODE = {ord(code): name for name, code in _CODES.items()}
# values that are preceded by their length, and the form of the length; their shorter forms, which
# are frequent, stand in the loop
LENGTHS = {
    0x58: ("text", "<I"), 0x8D: ("text", "<Q"), 0x55: ("a string of Python 2", "<B"),
    0x54: ("a string of Python 2", "<i"),
    0x8B: ("an integer", "<i"), 0x43: ("bytes", "<B"), 0x42: ("bytes", "<I"), 0x8E: ("bytes", "<Q"),
    0x96: ("a bytearray", "<Q"),
}  # fmt: skip
# bytes of operand, for those that have a fixed number
OPERANDS = {
    0x68: 1, 0x71: 1, 0x4B: 1, 0x8C: 1, 0x8A: 1, 0x43: 1, 0x55: 1, 0x4D: 2, 0x6A: 4, 0x72: 4,
    0x4A: 4, 0x58: 4, 0x8B: 4, 0x42: 4, 0x54: 4,
    0x47: 8, 0x8D: 8, 0x8E: 8, 0x96: 8, 0x95: 8,
}  # fmt: skip

# as unpickler and pickler map them for protocol 2, which Python 2 wrote and reads
PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
PYTHON2_NAMES = {
    ("__builtin__", "unicode"): "str",
    ("__builtin__", "long"): "int",
    ("__builtin__", "xrange"): "range",
}
TO_PYTHON2_MODULES = {new: old for old, new in PYTHON2_MODULES.items()}
TO_PYTHON2_NAMES = {
    (PYTHON2_MODULES[module], new): (module, old) for (module, old), new in PYTHON2_NAMES.items()
}


def lengthy(op: int, buffer: bytes, at: int, limits: Limits) -> tuple[Any, int]:
    """The value of an opcode that is followed by its length, and where the next one starts."""
    if op not in LENGTHS:
        raise _unknown(op)
    what, form = LENGTHS[op]
    (size,) = struct.unpack_from(form, buffer, at + 1)
    first = at + 1 + struct.calcsize(form)
    if size < 0:
        raise WrongError("M930", f"{what} of {size} bytes")
    most = (
        limits.blob
        if what in ("bytes", "a bytearray")
        else limits.integer
        if what == "an integer"
        else limits.text
    )
    if size > most:
        raise too_large(what, size, most)
    # never copied twice: a blob may be a quarter of all memory that a stream may take
    taken = memoryview(buffer)[first : first + size]
    if what == "an integer":
        return int.from_bytes(taken, "little", signed=True), first + size
    if what == "a bytearray":
        return bytearray(taken), first + size
    if what == "bytes":
        return bytes(taken), first + size
    return (
        str(taken, "ascii")
        if what == "a string of Python 2"
        else str(taken, "utf-8", "surrogatepass")
    ), first + size


def cut_off(buffer: bytes, at: int, framed: bool) -> WrongError:
    """Why an index was out of range: the stream or its frame ends, the memo has no such entry, or
    the stack is empty.
    """
    if at >= len(buffer) or at + OPERANDS.get(buffer[at], 0) >= len(buffer):
        return (
            WrongError("M930", "an opcode reaches out of its frame")
            if framed
            else EndedError("M930", "the stream ends before STOP")
        )
    if buffer[at] in (0x68, 0x6A):
        return WrongError("M930", "a memo entry is read, but was not written")
    return WrongError("M930", "an opcode takes more values than the stack holds above its mark")


def _unknown(op: int) -> WrongError:
    name = _BY_CODE.get(op)
    if name:
        return WrongError("M931", f"{name} is not read: {_REFUSED[name]}")
    return WrongError(
        "M930", "a second PROTO" if op == 0x80 else f"no opcode begins with the byte 0x{op:02x}"
    )


def too_large(what: str, size: int, limit: int) -> WrongError:
    return WrongError("M932", f"{what} of {size:,} bytes; at most {limit:,} are read")


_HELP = {
    "M930": "compare the file's size and checksum with those of its origin, and fetch it again",
    "M931": "nothing was executed; if you trust the file, load it where it was made and save its "
    "state dict again",
    "M932": "genuine checkpoints stay far below; check that the file is what it claims to be",
}
# opcodes between two looks at the counts
_STRIDE = 4096
# bytes of a text that is read in the loop
_LONG = 4096
# bytes of a frame, which is copied: writers end one after 64 KiB or the blob that exceeds it
_FRAME = 65 << 20


class _Hole:
    """The type of `_HOLE`, a memo entry that was skipped."""


_HOLE: Final = _Hole()
_UNTOUCHED: Final = (ABSENT, None, None)
_GROWING: Final = frozenset({list, Dict, Set, Call, _Hole})


def read_pickle(
    data: bytes | memoryview,
    limits: Limits,
    *,
    name: str,
    start: int = 0,
    whole: bool = True,
    persistent: bool = False,
) -> Any:
    """The one value of the pickle stream that starts at `start`, as inert nodes.

    The stream ends with the data; with `whole=False` other data may follow, and
    `(value, offset of what follows)` is returned. Anything but whole `bytes` is copied first, up to
    `limits.size`. `persistent` allows BINPERSID. `name` is the stream's name in messages, offsets
    there count from the beginning of `data`.

    What is returned is what the unpickler would make of the stream, with every call left undone: no
    cycles, no dict with a key twice, at most `limits.depth` deep. Raises CheckpointError alone:
    M930 not a pickle stream, M931 an opcode or a form that is refused, M932 a limit.
    """
    end = min(len(data), start + limits.size)
    if whole and end < len(data):
        fail(
            "M932",
            f"{name}: a pickle stream of {len(data) - start:,} bytes; at most {limits.size:,} are "
            "read",
            help=_HELP["M932"],
        )
    stream = (
        data if type(data) is bytes and not start and end == len(data) else bytes(data[start:end])
    )
    place = [0]
    value = None
    with collector_paused():
        try:
            value = _run(stream, limits, persistent, place)
            if whole and place[0] != len(stream):
                raise WrongError(
                    "M930", f"{len(stream) - place[0]:,} bytes follow the end of the pickle stream"
                )
            measure(value, limits, len(stream))
            problem = None
        except WrongError as error:
            # without its traceback, whose frames would keep all that was read
            problem = error.with_traceback(None)
        except MemoryError:
            problem = WrongError("M932", "a value that does not fit into memory")
    if problem is not None:
        if end < len(data) and isinstance(problem, EndedError):
            problem = WrongError("M932", f"a pickle stream of more than {limits.size:,} bytes")
        fail(
            problem.code,
            f"{name}: byte {start + min(place[0], len(stream)):,}: {problem.message}",
            help=_HELP[problem.code],
        )
    return value if whole else (value, start + place[0])


def _run(data: bytes, limits: Limits, persistent: bool, place: list[int]) -> Any:
    """The value. `place` receives the offset behind STOP, or that of the opcode that is wrong."""
    if data[:1] != b"\x80":
        raise WrongError(
            "M930", "not a pickle stream of protocol 2 to 5: it does not begin with PROTO"
        )
    if len(data) < 2 or not 2 <= data[1] <= 5:
        raise WrongError(
            "M930",
            f"a pickle stream of protocol {data[1]}; 2 to 5 are read"
            if data[1:]
            else "the stream ends before STOP",
        )
    protocol = data[1]
    # a writer spends a byte and more on a memo entry, and three on most containers
    memo_limit = min(limits.memo, 1000 + len(data))
    node_limit = min(limits.nodes, 100_000 + len(data) // 3)
    marks_limit, text_limit = limits.marks, min(limits.text, _LONG)
    half, word, signed = (
        struct.Struct("<H").unpack_from,
        struct.Struct("<I").unpack_from,
        struct.Struct("<i").unpack_from,
    )
    growing, absent, new, texts = _GROWING, ABSENT, object.__new__, {str}
    stack: list[Any] = []
    below: list[list[Any]] = []
    memo: list[Any] = []
    names: dict[tuple[str, str], Global] = {}
    # ids of containers that were read back, and the keys of those that grew twice
    closed: set[int] = set()
    seen: dict[int, set[Any]] = {}
    made: Any
    buffer = data
    at = 2
    base = after = 0
    framed = False
    nodes = opcodes = 0
    # after a gap in the memo, how long it is by its numbers: MEMOIZE would count otherwise
    numbered = 0
    ticks = repeat(None, _STRIDE)
    try:
        while True:
            try:
                for _ in ticks:
                    op = buffer[at]
                    if op == 0x94:  # MEMOIZE
                        memo.append(stack[-1])
                        at += 1
                    elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                        if op == 0x68:
                            value = memo[buffer[at + 1]]
                            size = 2
                        else:
                            value = memo[word(buffer, at + 1)[0]]
                            size = 5
                        if type(value) in growing:
                            if value is _HOLE:
                                raise WrongError(
                                    "M930", "a memo entry is read, but was not written"
                                )
                            closed.add(id(value))
                        stack.append(value)
                        at += size
                    elif op > 0x80:
                        if op == 0x85:  # TUPLE1
                            stack[-1] = (stack[-1],)
                            nodes += 1
                            at += 1
                        elif op == 0x81:  # NEWOBJ
                            arguments = stack.pop()
                            function = stack[-1]
                            if type(function) is not Global or type(arguments) is not tuple:
                                raise _uncallable(function, arguments)
                            # without __init__, which costs as much as all else here
                            stack[-1] = made = new(Call)
                            made.how = "newobj"
                            made.function = function
                            made.arguments = arguments
                            made.state = absent
                            made.items = made.pairs = None
                            nodes += 1
                            at += 1
                        elif op == 0x86:  # TUPLE2
                            value = stack.pop()
                            stack[-1] = (stack[-1], value)
                            nodes += 1
                            at += 1
                        elif op == 0x8C:  # SHORT_BINUNICODE
                            size = at + 2 + buffer[at + 1]
                            stack.append(buffer[at + 2 : size].decode("utf-8", "surrogatepass"))
                            at = size
                        elif op == 0x89:  # NEWFALSE
                            stack.append(False)
                            at += 1
                        elif op == 0x8A:  # LONG1
                            size = buffer[at + 1]
                            if size > limits.integer:
                                raise too_large("an integer", size, limits.integer)
                            size += at + 2
                            stack.append(
                                int.from_bytes(buffer[at + 2 : size], "little", signed=True)
                            )
                            at = size
                        elif op == 0x87:  # TUPLE3
                            value = stack.pop()
                            made = stack.pop()
                            stack[-1] = (stack[-1], made, value)
                            nodes += 1
                            at += 1
                        elif op == 0x88:  # NEWTRUE
                            stack.append(True)
                            at += 1
                        elif op == 0x93:  # STACK_GLOBAL
                            value = stack.pop()
                            made = stack.pop()
                            if type(value) is not str or type(made) is not str:
                                raise WrongError(
                                    "M930",
                                    f"STACK_GLOBAL takes {kind_of(made)} and {kind_of(value)} for "
                                    "a name",
                                )
                            stack.append(_named(made, value, names))
                            at += 1
                        elif op == 0x95:  # FRAME
                            (size,) = struct.unpack_from("<Q", buffer, at + 1)
                            if framed:
                                raise WrongError("M930", "FRAME inside a frame")
                            if size > len(data) - at - 9:
                                raise EndedError(
                                    "M930",
                                    f"a frame of {size:,} bytes, {len(data) - at - 9:,} are left",
                                )
                            if size > _FRAME:
                                raise too_large("a frame", size, _FRAME)
                            base = at + 9
                            after = base + size
                            buffer = data[base:after]
                            framed = True
                            at = 0
                        elif op == 0x8F:  # EMPTY_SET
                            stack.append(Set(False))
                            nodes += 1
                            at += 1
                        elif op == 0x90 or op == 0x91:  # ADDITEMS, FROZENSET
                            items = stack
                            stack = below.pop()
                            if op == 0x91:
                                stack.append(Set(True))
                                nodes += 1
                            target = stack[-1]
                            if type(target) is not Set or (op == 0x90 and target.frozen):
                                raise WrongError("M931", f"ADDITEMS adds to {kind_of(target)}")
                            if id(target) in closed:
                                raise _changed(target)
                            nodes += _distinct(
                                target, items, target.items if id(target) not in seen else [], seen
                            )
                            target.items += items
                            at += 1
                        elif op == 0x92:  # NEWOBJ_EX
                            keywords = stack.pop()
                            arguments = stack.pop()
                            function = stack[-1]
                            if type(function) is not Global or type(arguments) is not tuple:
                                raise _uncallable(function, arguments)
                            if type(keywords) is not Dict or keywords.pairs:
                                raise WrongError(
                                    "M931",
                                    f"NEWOBJ_EX calls {kind_of(function)} with keyword arguments",
                                )
                            stack[-1] = Call("newobj", function, arguments)
                            nodes += 1
                            at += 1
                        else:
                            value, at = lengthy(op, buffer, at, limits)
                            stack.append(value)
                    elif op > 0x6A:
                        if op == 0x72 or op == 0x71:  # LONG_BINPUT, BINPUT
                            if op == 0x72:
                                (index,) = word(buffer, at + 1)
                                size = 5
                            else:
                                index = buffer[at + 1]
                                size = 2
                            if index != len(memo):
                                if index > memo_limit:
                                    raise WrongError(
                                        "M932",
                                        f"memo entry {index:,}; at most {memo_limit:,} in this "
                                        "stream",
                                    )
                                if index < len(memo):
                                    if memo[index] is not _HOLE:
                                        raise WrongError(
                                            "M930", f"memo entry {index} is written twice"
                                        )
                                    memo[index] = stack[-1]
                                    at += size
                                    continue
                                numbered = numbered or len(memo)
                                numbered += index - len(memo)
                                memo += repeat(_HOLE, index - len(memo))
                            memo.append(stack[-1])
                            if numbered:
                                numbered += 1
                            at += size
                        elif op == 0x74:  # TUPLE
                            items = stack
                            stack = below.pop()
                            stack.append(tuple(items))
                            nodes += 1
                            at += 1
                        elif op == 0x75:  # SETITEMS
                            items = stack
                            stack = below.pop()
                            target = stack[-1]
                            if id(target) in closed:
                                raise _changed(target)
                            keys = items[::2]
                            once = type(target) is Dict and not target.pairs
                            # the common case: a dict that grows once, by texts
                            if (
                                once
                                and set(map(type, keys)) == texts
                                and len(set(keys)) * 2 == len(items)
                            ):
                                target.pairs = list(zip(keys, items[1::2], strict=True))
                            else:
                                nodes += _set(target, items, seen)
                            at += 1
                        elif op == 0x7D:  # EMPTY_DICT
                            stack.append(made := new(Dict))
                            made.pairs = []
                            nodes += 1
                            at += 1
                        elif op == 0x73:  # SETITEM
                            value = stack.pop()
                            key = stack.pop()
                            target = stack[-1]
                            if id(target) in closed:
                                raise _changed(target)
                            nodes += _set(target, [key, value], seen)
                            at += 1
                        else:
                            value, at = lengthy(op, buffer, at, limits)
                            stack.append(value)
                    elif op == 0x4B:  # BININT1
                        stack.append(buffer[at + 1])
                        at += 2
                    elif op == 0x28:  # MARK
                        if len(below) >= marks_limit:
                            raise WrongError("M932", f"more than {marks_limit} marks open")
                        below.append(stack)
                        stack = []
                        at += 1
                    elif op == 0x29:  # EMPTY_TUPLE
                        stack.append(())
                        at += 1
                    elif op == 0x62:  # BUILD
                        value = stack.pop()
                        target = stack[-1]
                        if type(target) is not Call:
                            raise WrongError(
                                "M931",
                                f"BUILD gives a state to {kind_of(target)}; only what was called "
                                "has one",
                            )
                        if target.state is not absent:
                            raise WrongError(
                                "M931", f"BUILD gives a second state to {kind_of(target)}"
                            )
                        if id(target) in closed:
                            raise _changed(target)
                        target.state = value
                        at += 1
                    elif op == 0x52:  # REDUCE
                        arguments = stack.pop()
                        function = stack[-1]
                        if type(function) is not Global or type(arguments) is not tuple:
                            function = _method(function, arguments, names)
                        stack[-1] = made = new(Call)
                        made.how = "reduce"
                        made.function = function
                        made.arguments = arguments
                        made.state = absent
                        made.items = made.pairs = None
                        nodes += 1
                        at += 1
                    elif op == 0x58:  # BINUNICODE
                        (size,) = word(buffer, at + 1)
                        if size > text_limit:
                            value, at = lengthy(op, buffer, at, limits)
                            stack.append(value)
                        else:
                            size += at + 5
                            stack.append(buffer[at + 5 : size].decode("utf-8", "surrogatepass"))
                            at = size
                    elif op == 0x4D:  # BININT2
                        stack.append(half(buffer, at + 1)[0])
                        at += 3
                    elif op == 0x51:  # BINPERSID
                        if not persistent:
                            raise WrongError(
                                "M931", "BINPERSID: a persistent id where no storage can be"
                            )
                        stack[-1] = Persistent(stack[-1])
                        nodes += 1
                        at += 1
                    elif op == 0x4A:  # BININT
                        stack.append(signed(buffer, at + 1)[0])
                        at += 5
                    elif op == 0x5D:  # EMPTY_LIST
                        stack.append([])
                        nodes += 1
                        at += 1
                    elif op == 0x61:  # APPEND
                        value = stack.pop()
                        target = stack[-1]
                        if id(target) in closed:
                            raise _changed(target)
                        _append(target, [value])
                        at += 1
                    elif op == 0x65:  # APPENDS
                        items = stack
                        stack = below.pop()
                        target = stack[-1]
                        if id(target) in closed:
                            raise _changed(target)
                        _append(target, items)
                        at += 1
                    elif op == 0x4E:  # NONE
                        stack.append(None)
                        at += 1
                    elif op == 0x47:  # BINFLOAT
                        stack.append(struct.unpack_from(">d", buffer, at + 1)[0])
                        at += 9
                    elif op == 0x63:  # GLOBAL
                        size = buffer.find(b"\n", at, at + 256) + 1
                        index = buffer.find(b"\n", size, size + 256) + 1
                        if not size or not index:
                            raise WrongError(
                                "M930", "GLOBAL without two lines, each of which is a short name"
                            )
                        function = buffer[at + 1 : size - 1].decode()
                        value = buffer[size : index - 1].decode()
                        if protocol == 2:
                            value = PYTHON2_NAMES.get((function, value), value)
                            function = PYTHON2_MODULES.get(function, function)
                        stack.append(_named(function, value, names))
                        at = index
                    elif op == 0x2E:  # STOP
                        if framed and at + 1 != len(buffer):
                            raise WrongError("M930", "STOP before the end of its frame")
                        if below or len(stack) != 1:
                            raise WrongError(
                                "M930",
                                "STOP with "
                                f"{'a mark open' if below else f'{len(stack):,} values on the stack'}",  # noqa: E501
                            )
                        if numbered and len(memo) > numbered:
                            raise WrongError(
                                "M931", "a memo that is both numbered with gaps and counted"
                            )
                        _count(opcodes, 0, memo, memo_limit, nodes, node_limit, limits)
                        at += 1
                        return stack[0]
                    else:
                        value, at = lengthy(op, buffer, at, limits)
                        stack.append(value)
                opcodes += _STRIDE
                ticks = repeat(None, _STRIDE)
                _count(
                    opcodes,
                    len(stack) + sum(map(len, below)),
                    memo,
                    memo_limit,
                    nodes,
                    node_limit,
                    limits,
                )
            except IndexError:
                if not framed or at != len(buffer):
                    raise cut_off(buffer, at, framed) from None
                # between two opcodes, where a frame may end
                buffer, at, base, framed = data, after, 0, False
            except struct.error:
                raise cut_off(buffer, at, framed) from None
            except UnicodeDecodeError as error:
                raise WrongError("M930", f"text that is not {error.encoding.upper()}") from None
    finally:
        place[0] = base + at


def _named(module: str, name: str, names: dict[tuple[str, str], Global]) -> Global:
    """The global, one object per name; a dotted name could reach whatever its module imports."""
    if (module, name) in names:
        return names[module, name]
    if len(module) > 200 or len(name) > 200:
        raise WrongError("M932", "a global's module or name of more than 200 characters")
    if not module.isascii() or not all(map(str.isidentifier, module.split("."))):
        raise WrongError("M931", f"{printable(module)}: not the name of a module")
    if not name.isascii() or not name.isidentifier():
        raise WrongError("M931", f"{printable(name)}: not a plain name in {printable(module)}")
    names[module, name] = made = Global(module, name)
    return made


def _count(
    opcodes: int,
    stack: int,
    memo: list[Any],
    memo_limit: int,
    nodes: int,
    node_limit: int,
    limits: Limits,
) -> None:
    """M932 for the count that has reached its limit."""
    if opcodes > limits.opcodes:
        raise WrongError("M932", f"more than {limits.opcodes:,} opcodes")
    if stack > limits.stack:
        raise WrongError("M932", f"more than {limits.stack:,} values on the stack")
    if len(memo) > memo_limit:
        raise WrongError("M932", f"more than {memo_limit:,} memo entries")
    if nodes > node_limit:
        raise WrongError("M932", f"more than {node_limit:,} containers and calls")


def _changed(target: Any) -> WrongError:
    return WrongError(
        "M931",
        f"{kind_of(target)} changes after it was used, as only values that contain themselves do",
    )


def _uncallable(function: Any, arguments: Any) -> WrongError:
    if type(function) is not Global:
        return WrongError(
            "M931", f"calls {kind_of(function)}; only what a name stands for can be called"
        )
    return WrongError(
        "M930",
        f"calls {kind_of(function)} with {kind_of(arguments)} instead of a tuple of arguments",
    )


def _method(function: Any, arguments: Any, names: dict[tuple[str, str], Global]) -> Global:
    """The constructor that a class of Transformer Engine was asked for by name: one method, of
    whatever class, and nothing else's.
    """
    if (
        type(function) is Call
        and type(arguments) is tuple
        and str(function.function) in ("builtins.getattr", "__builtin__.getattr")
    ):
        match function.arguments:
            case (Global() as cls, str(method)) if (
                method == METHOD and (function.state, function.items, function.pairs) == _UNTOUCHED
            ):
                # under a key that no name has
                return names.setdefault(
                    (cls.module, f"{cls.name}.{METHOD}()"),
                    Global(cls.module, f"{cls.name}.{METHOD}"),
                )
    raise _uncallable(function, arguments)


def _append(target: Any, items: list[Any]) -> None:
    if type(target) is list:
        target += items
    elif type(target) is not Call:
        raise WrongError("M931", f"APPENDS adds to {kind_of(target)}")
    elif target.items is None:
        target.items = items
    else:
        target.items += items


def _set(target: Any, items: list[Any], seen: dict[int, set[Any]]) -> int:
    """Puts key, value, key, value … into a dict or a call; returns what its keys cost, in nodes."""
    if type(target) is Dict:
        pairs = target.pairs
    elif type(target) is Call:
        if target.pairs is None:
            target.pairs = []
        pairs = target.pairs
    else:
        raise WrongError("M931", f"SETITEMS sets an item of {kind_of(target)}")
    if len(items) & 1:
        raise WrongError("M930", "SETITEMS with a key that has no value")
    keys = items[::2]
    cost = _distinct(
        target, keys, [key for key, _ in pairs] if pairs and id(target) not in seen else [], seen
    )
    pairs += zip(keys, items[1::2], strict=True)
    return cost


def _distinct(target: Any, keys: list[Any], earlier: list[Any], seen: dict[int, set[Any]]) -> int:
    """Sees to it that none of the keys is there twice; returns what they cost, in nodes.

    Most containers grow once: keys are remembered from the second time on, after `earlier`.
    """
    if earlier:
        seen[id(target)] = set(forms_of(earlier)[0])
    forms, cost = forms_of(keys)
    fresh = set(forms)
    known = seen.get(id(target))
    if len(fresh) < len(forms) or (known is not None and not known.isdisjoint(fresh)):
        met = set(known or ())
        twice = next(form for form in forms if form in met or met.add(form))  # type: ignore[func-returns-value]
        shown = f"the key {printable(twice[:200])}" if type(twice) is str else "a key"
        raise WrongError(
            "M931", f"{shown} occurs twice in one dict or set, and readers differ on which counts"
        )
    if known is not None:
        known |= fresh
    return cost
