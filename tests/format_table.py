"""The README's table of number formats: what the codecs, the included rules and the data of the
tests say.

    python tests/format_table.py

writes it into the README, between its first line and the empty line after the last.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from migrate.codecs.base import Codec

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
README = ROOT / "README.md"
HEAD = "| format | stored by | read | written | recoded to | lineages | compared with |"

# beginnings of the names of goldens and of genuine checkpoints, and whose bytes these are
PEERS = {
    "ao": "torchao", "torchao": "torchao", "ct": "compressed-tensors", "hf": "transformers",
    "modelopt": "ModelOpt", "te": "Transformer Engine", "deepgemm": "DeepGEMM",
    "gptoss": "gpt-oss", "gpt": "transformers", "gguf": "gguf-py",
    "deepseek": "transformers", "mxfp4": "ModelOpt", "gptq": "GPTQModel", "awq": "AutoAWQ",
    "kimi": "compressed-tensors", "mistral": "transformers", "bnb": "bitsandbytes",
}  # fmt: skip
# what their names call the formats
FORMATS = {
    "fp8": r"(?<!mx)fp8(?![_-]block)|float8", "fp8-block": r"fp8[_-]block|deepseek-v4",
    "mxfp8": "mxfp8", "mxfp4": "mxfp4|fp4_ue8m0|gpt-oss|deepseek-v4", "nvfp4": "nvfp4",
    "awq": "^awq", "int-pack": r"ct[_-]w\d+a16|kimi|ct-mixed-int",
    "int8": r"(?<!bnb[_-])int8|torchao-intx|ct-w8a8|ct-mixed-int", "int4-rows": "modelopt_int4",
    "bnb-4bit": "^bnb[_-](nf4|fp4)", "sparse-24": "sparse24", "sparse-bitmask": "ct-bitmask",
    "marlin-24": "marlin24",
}  # fmt: skip

# what one becomes without numbers where its scales permit it, which most files' do
RECODED = {
    "fp8": ("fp8", "fp8-block", "mxfp8"),
    "fp8-block": ("fp8-block", "mxfp8"),
    "mxfp8": ("mxfp8", "fp8-block"),
    "mxfp4": ("mxfp4", "mxfp8", "fp8-block", "nvfp4"),
    "nvfp4": ("nvfp4",),
    "int-pack": ("int-pack", "int8", "gptq", "awq", "gguf"),
    "int8": ("int8", "int-pack", "gptq", "gguf"),
    "gptq": ("gptq", "int-pack", "int8"),
    "awq": ("int-pack", "gptq"),
    "int4-rows": ("int-pack", "int8", "gptq", "awq", "gguf"),
    "gguf": ("int-pack", "int8"),
}


def table() -> str:
    """The table, one row for each codec, and one for the formats that are named and not read."""
    from migrate import codecs
    from migrate.codecs._formats import FORMATS as named

    rows = [HEAD, re.sub("[^|]+", "---", HEAD)]
    for name in codecs.names():
        codec = codecs.get(name)
        cells = (
            f"`{name}`",
            producers(codec),
            "yes",
            "yes" if codec.encodes else "no",
            quoted(recodings(name)),
            quoted(lineages(name)),
            ", ".join(peers(name)),
        )
        rows.append(f"| {' | '.join(cells)} |")
    rest = dict.fromkeys(name for name, _ in named if name not in codecs.names())
    if rest:
        said = "named by `inspect`, and their parts kept together"
        rows.append(f"| {quoted(rest)} | {said} | no | no | | | |")
    return "\n".join(rows)


def producers(codec: Codec) -> str:
    """Who stores it, each once; releases and forms of one are one."""
    said = [word for names in codec.names for word in names.producer.split(", ")]
    words = [re.sub(r"-V\d$| \d$", "", word) for word in said if word != "stacked experts"]
    return ", ".join(dict.fromkeys(words))


def quoted(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def lineages(codec: str) -> list[str]:
    """The included lineages whose rules use the codec."""
    used = re.compile(rf"codec: {re.escape(codec)}(?![\w-])")
    return sorted({
        file.relative_to(ROOT / "rules").parts[0]
        for file in (ROOT / "rules").rglob("*.yaml")
        if used.search(file.read_text(encoding="utf-8"))
    })  # fmt: skip


def recodings(codec: str) -> list[str]:
    """Those of `RECODED` that `recode` has a way to: with some arguments of the samples of both, a
    matrix is planned.
    """
    from migrate import codecs

    return [
        other for other in RECODED.get(codec, ()) if _planned(codecs.get(codec), codecs.get(other))
    ]


def _planned(one: Codec, other: Codec) -> bool:
    from migrate import ops
    from migrate.core.declaration import NumberFormat
    from migrate.core.errors import OpError

    recode: Any = ops.get("recode")
    goals = [args for args, _ in (*other.samples(), *other.stored())]
    for args, there, known in _stored(one):
        for goal in goals:
            said = NumberFormat(one.name, args), NumberFormat(other.name, goal)
            try:
                recode.settle(recode.Args(*said), list(there), list(there.values()), known)
            except OpError:
                continue
            return True
    return False


def _stored(codec: Codec) -> Iterator[tuple[Any, dict[str, Any], Mapping[str, bytes]]]:
    """Arguments, the specs of parts by role, and the bytes of those that planning reads."""
    from migrate.core.errors import OpError
    from migrate.core.spec import Spec

    # whose dtype is that of scales as well
    numbers = [Spec(dtype, (256, 256)) for dtype in ("bfloat16", "float16")]
    for of, (args, _) in product(numbers, codec.samples()):
        try:
            specs = zip(codec.parts, codec.encoded(args, of), strict=True)
        except OpError:
            # groups that 256 columns are no multiple of
            continue
        yield args, {r: s for r, s in specs if s is not None}, codec.foreseen(args, of)
    for args, parts in codec.stored():
        held = {r: p for r, p in zip(codec.parts, parts, strict=True) if p is not None}
        known = {r: held[r][1].tobytes() for r in codec.planning if r in held}
        yield args, {r: spec for r, (spec, _) in held.items()}, known


def peers(codec: str) -> list[str]:
    """Whose files the tests compare with, bit for bit."""
    kinds = set()
    for path in (DATA / "quant").glob("*.tar.xz"):
        with tarfile.open(path) as archive:
            kinds |= {Path(member.name).parts[0] for member in archive}
    kinds |= {path.name for path in (DATA / "genuine").iterdir() if path.is_dir()}
    form = FORMATS.get(codec, re.escape(codec.replace("-", "_")))
    found = {PEERS[re.split("[_-]", kind)[0]] for kind in kinds if re.search(form, kind)}
    return sorted(found, key=str.lower)


def shown(text: str) -> str:
    """The table that a page has now."""
    _, found, rest = text.partition(HEAD)
    return found + rest.split("\n\n")[0].rstrip("\n") if found else ""


if __name__ == "__main__":
    page = README.read_text(encoding="utf-8")
    README.write_text(page.replace(shown(page), table()), encoding="utf-8")
