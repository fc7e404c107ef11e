"""What an output is written as: in which format, whether as one file or as a folder, and whether
that has a place for what is kept for the way back.
"""

from __future__ import annotations

import os
from dataclasses import replace

from .. import formats
from ..core.errors import fail, listed, option, printable
from ..planning.request import DESCRIBED, OUTPUT_FORMATS, Request
from ..source import places
from ..source.index import Index, Source
from ..source.pickle.tree import DictNode

# a name with one of these is that of one file
SUFFIXES = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
# of formats that are not written, beside those that are known among side files
_OTHERS = (".pkl", ".pickle", ".hdf5", ".keras", ".nemo", ".pt2")
# endings of fewer letters are near to too many words that a folder may end in
_LONG = 4


def is_folder(source: Source, single_file: bool | None, written: str = "") -> bool:
    """Whether the output is a folder; M115 where one file is asked for of a format, `written`, that
    has none.
    """
    if written in DESCRIBED:
        if single_file:
            fail(
                "M115",
                f"{option('single_file')}: a distributed checkpoint is a folder",
                help="leave it out",
            )
        return True
    if single_file is not None:
        return not single_file
    if source.format == "memory" or getattr(source, "reference", None):
        return bool(source.index.side_files)
    if source.format in (*DESCRIBED, "gguf"):
        # `.metadata` names it too, and what becomes of a GGUF file has its key-values beside it
        return True
    return places.is_folder(source.path) or source.path.endswith(".index.json")


def has_place(index: Index, written: str, folder: bool) -> bool:
    """Whether an output in this format has a place for what is kept: safetensors of a folder have
    files beside them, and other formats that of a checkpoint that has more than one dict.
    """
    part = None if index.tree is None else index.tree.parts[0]
    if part is not None and type(part.root) is not DictNode:
        return False
    if written not in OUTPUT_FORMATS and not formats.holds_trees(written):
        return False
    return folder if written == OUTPUT_FORMATS[0] else part is not None and bool(part.at)


def format_of_ending(suffix: str) -> str | None:
    """The name of the format whose files end so, which is written; None without one. Third parties
    are asked about what no built-in knows.
    """
    found = SUFFIXES.get(suffix)
    return formats.foreign_endings().get(suffix) if suffix and found is None else found


def output_format_of(source_format: str, request: Request) -> str:
    """The name of the format of the output: what was asked for, else the source's, safetensors for
    what lies in memory, for what is only read, and for that of Megatron, which holds no other
    models.
    """
    if request.output_format is not None or source_format in OUTPUT_FORMATS[:3]:
        return request.output_format or source_format
    return source_format if formats.is_foreign(source_format, writes=True) else OUTPUT_FORMATS[0]


def shape_of(name: str, source_format: str, request: Request) -> tuple[bool, Request]:
    """Whether an output of this name is a folder, and the request with the name's format.

    M115 if it says another format than the request, or, where the request says none, one that is
    not written or is misspelt.
    """
    suffix = os.path.splitext(name)[1]
    said = format_of_ending(suffix)
    if said is None:
        if request.output_format is None:
            _refuse_ending(name, suffix)
        return True, request
    if request.output_format not in (None, said):
        both = (
            f"{option('output_format', request.output_format)} and a file called "
            f"`{printable(name)}`"
        )
        fail("M115", both, help="give it another ending, or none: a folder")
    return False, request if said == output_format_of(source_format, request) else replace(
        request, output_format=said
    )


def _refuse_ending(name: str, suffix: str) -> None:
    """M115 for a name that ends like a file of weights and would be that of a folder; other dots
    say nothing (`Llama-3.1-8B`).
    """
    from difflib import get_close_matches  # of such names only

    from ..source.paths import WEIGHT_SUFFIXES

    low, endings = suffix.lower(), list(SUFFIXES)
    other = next(
        (ending for ending in (*WEIGHT_SUFFIXES, *_OTHERS) if name.lower().endswith(ending)), None
    )
    long = [ending for ending in endings if len(ending) > _LONG]
    near = (
        [low]
        if low in SUFFIXES
        else get_close_matches(low, long, n=1, cutoff=0.75)
        if low[1:].isalpha()
        else []
    )
    near = near or [
        ending for ending in endings if len(ending) >= _LONG and sorted(low) == sorted(ending)
    ]
    if not (near or other):
        return
    what = (
        f"`{printable(name)}` ends in `{printable(suffix)}`"
        if near
        else f"`{printable(name)}` is the name of a file in another format"
    )
    hint = (
        f"did you mean `{printable(name[: len(name) - len(suffix)] + near[0])}`?"
        if near
        else f"files end in {listed(endings)}"
    )
    fail(
        "M115",
        f"{what}, and would be a folder",
        help=f"{hint} (with {option('output_format')} a folder of this name is made)",
    )
