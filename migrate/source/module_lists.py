"""Lists that select modules, read as the libraries read them that wrote them into a configuration.

A module is a key without its last segment. What the libraries do:

* compressed-tensors (`utils/match.py`, `is_match`): an exact name; behind `re:` an expression that
  matches from the start of the name; or the name of a class, which keys do not show.
* transformers (`quantizers/quantizers_utils.py`, `should_convert_module`, 5.23): an expression that
  matches from the start up to the end of a segment, or a text in which the name ends.
* ModelOpt (as vLLM's and TensorRT-LLM's readers do): `fnmatch` of the whole name.

Nothing of a checkpoint is given to `re`: see `core/regexes.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.regexes import RegexError as RegexError
from ..core.regexes import Regexes

EXACT, COMPRESSED_TENSORS, TRANSFORMERS, MODELOPT = (
    "exact", "compressed-tensors", "transformers", "modelopt",
)  # fmt: skip
LIBRARIES = (EXACT, COMPRESSED_TENSORS, TRANSFORMERS, MODELOPT)
# where a configuration may say how weights are encoded; in config.json, the older name last
CONFIG, MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
QUANTIZATION = ("quantization_config", "compression_config")
_BY_TRANSFORMERS = ("fp8", "gptq", "awq", "mxfp4", "bitsandbytes", "torchao")
# names and what stands for any character in an expression
_PLAIN = re.compile(r"[A-Za-z0-9_.\-]+")
_CLASS = re.compile(r"[A-Z][A-Za-z0-9_]*")


class ModuleList:
    """Which modules a list of texts means to one of LIBRARIES. Matching takes time linear in the
    name, however many texts there are.
    """

    __slots__ = ("_selects", "items", "library")

    def __init__(self, items: Iterable[str], library: str = EXACT) -> None:
        """RegexError for a text that the library could not read, or that needs backtracking."""
        self.items, self.library = tuple(items), library
        self._selects = _READERS[library](self.items)

    def selects(self, module: str) -> bool:
        """Whether one of the texts means the module; names of classes mean none."""
        return self._selects(module)


def list_library(value: Callable[[str], Mapping[str, Any] | None]) -> str:
    """Which library reads the lists of modules in the side files; EXACT if that is not known.

    `value` answers with the JSON object in a side file, None if the file is not there.
    """
    config: Any = value(CONFIG) or {}
    for place in (config, config.get("text_config")):
        for name in QUANTIZATION if isinstance(place, Mapping) else ():
            if isinstance(found := place.get(name), Mapping):
                return _library_of(found)
    return MODELOPT if value(MODELOPT_CONFIG) is not None else EXACT


def _library_of(quantization: Mapping[str, Any]) -> str:
    method = str(quantization.get("quant_method", "")).lower()
    if method.startswith("modelopt"):
        return MODELOPT
    if method == COMPRESSED_TENSORS or (not method and "config_groups" in quantization):
        return COMPRESSED_TENSORS
    return TRANSFORMERS if method in _BY_TRANSFORMERS else EXACT


def is_class(text: str) -> bool:
    """Whether a text of compressed-tensors can be the name of a class, such as `Linear`."""
    return _CLASS.fullmatch(text) is not None


def is_pattern(text: str, library: str) -> bool:
    """Whether a text is more than the name of one module."""
    if library == COMPRESSED_TENSORS:
        return text.startswith("re:")
    if library == MODELOPT:
        return any(mark in text for mark in "*?[")
    return library == TRANSFORMERS and not _PLAIN.fullmatch(text)


def _exact(items: tuple[str, ...]) -> Callable[[str], bool]:
    return frozenset(items).__contains__


def _compressed_tensors(items: tuple[str, ...]) -> Callable[[str], bool]:
    names = frozenset(item for item in items if not item.startswith("re:"))
    found = [item.removeprefix("re:") for item in items if item.startswith("re:")]
    if not found:
        return names.__contains__
    expressions = Regexes(found)
    return lambda module: module in names or expressions.match(module)


def _transformers(items: tuple[str, ...]) -> Callable[[str], bool]:
    expressions = Regexes(item for item in items if not _PLAIN.fullmatch(item))
    # names of one length with dots at the same places: a dot stands for any character
    masks: dict[tuple[int, ...], set[str]] = {}
    for item in items:
        if _PLAIN.fullmatch(item):
            dots = (at for at, char in enumerate(item) if char == ".")
            masks.setdefault((len(item), *dots), set()).add(item)

    ends: dict[int, set[str]] = {}
    for item in items:
        ends.setdefault(len(item), set()).add(item)

    def selects(module: str) -> bool:
        size = len(module)
        if any(n <= size and module[size - n :] in known for n, known in ends.items()):
            return True
        for (length, *dots), known in masks.items():
            if length <= len(module) and _is_border(module, length):
                begin = list(module[:length])
                for at in dots:
                    begin[at] = "." if begin[at] != "\n" else "\n"
                if "".join(begin) in known:
                    return True
        return any(_is_border(module, end) for end in expressions.ends(module))

    return selects


def _is_border(module: str, at: int) -> bool:
    """Whether a segment ends or begins there, as transformers asks for it."""
    return at == len(module) or module[at:] == "\n" or "." in module[max(at - 1, 0) : at + 1]


def _modelopt(items: tuple[str, ...]) -> Callable[[str], bool]:
    names = frozenset(item for item in items if not is_pattern(item, MODELOPT))
    globs = [_translated(item) for item in items if is_pattern(item, MODELOPT)]
    if not globs:
        return names.__contains__
    expressions = Regexes(globs)
    return lambda module: module in names or len(module) in expressions.ends(module)


def _translated(glob: str) -> str:
    """The expression that matches what `fnmatch` does, where it matches the whole text."""
    out, at = [], 0
    while at < len(glob):
        char = glob[at]
        at += 1
        # a bracket right behind the first one is a member, as in `[]a]`
        end = glob.find("]", at + glob.startswith("!", at) + 1)
        if char == "*":
            out.append(r"[\s\S]*")
        elif char == "?":
            out.append(r"[\s\S]")
        elif char == "[" and end > 0:
            inside = glob[at:end]
            but = inside.startswith("!")
            inside = inside[but:].replace("\\", r"\\").replace("[", r"\[").replace("]", r"\]")
            out.append(f"[{'^' * but}{inside if not inside.startswith('^') else chr(92) + inside}]")
            at = end + 1
        else:
            out.append(re.escape(char))
    return "".join(out)


_READERS: dict[str, Callable[[tuple[str, ...]], Callable[[str], bool]]] = {
    EXACT: _exact,
    COMPRESSED_TENSORS: _compressed_tensors,
    TRANSFORMERS: _transformers,
    MODELOPT: _modelopt,
}
