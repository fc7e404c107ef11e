"""The side files of one run, as the edges walked so far leave them.

Rules ask them for params and patch them. Nothing is written here: an edge reads what the edge
before it would have left, and what is different at the end is written with the output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import fail, printable
from ..rules.files import VALUES
from ..source import jsontext
from .patches import (
    ABSENT,
    DEEPEST,
    WRITTEN_NULL,
    Change,
    apply_patch,
    dump_json,
    json_depth,
    leaves_of_patch,
    same_json,
)

if TYPE_CHECKING:
    from ..source.index import Index
    from ..source.values import PlacedValues

ReadSide = Callable[[str], "bytes | None"]
# bytes; far above any configuration, far below what takes a second to read
MAX_READ = 16_000_000
# a stamp nests what it holds of a file three deeper
MAX_DEPTH = DEEPEST - 8


def clash(paths: Iterable[str]) -> tuple[str, str] | None:
    """The first path that is a file and, for another path, a folder; with that other one."""
    known = set(paths)
    for path in sorted(known):
        at = path.rfind("/")
        while at > 0:
            if path[:at] in known:
                return path[:at], path
            at = path.rfind("/", 0, at)
    return None


def refuse_clash(file: str, below: str) -> NoReturn:
    """M513: the two cannot both be written."""
    what = f"{printable(file)} would be a file and the folder of {printable(below)}"
    fail(
        "M513",
        what,
        help="both would be in the output; choose another name for what a rule file creates",
    )


class SideFiles:
    """JSON objects beside the tensors: those of files, and at `VALUES` the values beside the model.

    `left_out` are files that are there and are not carried, `carried` those that are; `index` is
    that of the checkpoint whose values these are, and which params may name; `partial`: it is one
    part of what a checkpoint was cut into.
    """

    def __init__(
        self,
        read: ReadSide,
        left_out: Collection[str] = (),
        carried: Collection[str] = (),
        index: Index | None = None,
    ) -> None:
        self._read_source, self._left_out, self._carried = read, left_out, carried
        self._index, self._beside = index, dict[str, list[tuple[str, Any]]]()
        self.partial = index is not None and index.grid is not None and index.grid.alone
        # the values of the index once one is asked for, their names by dict
        self._placed: PlacedValues | None = None
        self._values: dict[str, dict[str, Any] | None] = {}
        # path -> what stands in it now, None: it is gone; only files that differ from the source's
        self.changed: dict[str, bytes | None] = {}

    def _source_values(self) -> dict[str, Any] | None:
        tree = None if self._index is None else self._index.tree
        if tree is None:
            return None
        from ..source.root_values import values_of

        return values_of(tree.parts[0])

    @property
    def values(self) -> tuple[Any, Any] | None:
        """The values beside the model as they were and as they are now; None where they are as
        they were.
        """
        two = self._source_values(), self.value(VALUES)
        return None if same_json(*two) else two

    def read_file(self, path: str) -> bytes | None:
        """The bytes of the file as it now is; None if it is not there."""
        return self.changed[path] if path in self.changed else self._read_source(path)

    def value(self, path: str) -> dict[str, Any] | None:
        """The JSON object in the file, not to be changed; None if it is not there. M513 or M906 if
        it holds something else.
        """
        if path not in self._values:
            self._values[path] = self._parsed(path)
        return self._values[path]

    def value_at(self, path: str, keys: Sequence[str]) -> Any:
        """The value at `keys`: names of objects, digits for lists. ABSENT if there is none."""
        value: Any = self.value(path)
        for key in keys:
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif (
                isinstance(value, list)
                and key.isascii()
                and key.isdigit()
                and int(key) < len(value)
            ):
                value = value[int(key)]
            else:
                return ABSENT
        return ABSENT if value is None and not keys else value

    def places(self, path: str, keys: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """The places that `keys` mean: `*` is every name of an object, or item of a list."""
        if "*" not in keys:
            yield keys
            return
        at = keys.index("*")
        there = self.value(path) and self.value_at(path, keys[:at])
        names = list(map(str, range(len(there)))) if isinstance(there, list) else there
        for name in names if isinstance(names, (list, dict)) else ():
            yield from self.places(path, (*keys[:at], name, *keys[at + 1 :]))

    def differences(self, path: str, patch: Any) -> Iterator[Change]:
        """What the patch changes of what is there: each value that it says otherwise, ABSENT after
        it where it removes one. A name `*` in it is every name of an object.
        """
        for asked, value in leaves_of_patch(patch):
            for at in self.places(path, asked):
                above = [self.value_at(path, at[:n]) for n in range(len(at))]
                was, new = self.value_at(path, at), None if value is WRITTEN_NULL else value
                there = was is not ABSENT and all(isinstance(one, dict) for one in above)
                if there and not same_json(was, new):
                    yield Change(at, was, ABSENT if value is None else new)

    def beside(self, places: str | Sequence[str]) -> list[tuple[str, Any]]:
        """(where it stands, the value) of what is at these places among the checkpoint's values."""
        asked = [places] if isinstance(places, str) else places
        if self._index is not None and any(place not in self._beside for place in asked):
            if self._placed is None:
                # most rules ask for none
                from ..source.values import PlacedValues

                self._placed = PlacedValues.of(self._index)
            values = self._placed
            self._beside.update({place: list(values.at(place)) for place in asked})
        return [said for place in asked for said in self._beside.get(place, ())]

    def put_value(self, path: str, value: dict[str, Any] | None) -> None:
        """Makes the file hold `value`, in its style; None removes it. Equal values change no byte.

        M513 for a new file whose path is a folder, or runs through a file.
        """
        before = self.value(path)
        if same_json(before, value):
            return
        now = self.read_file(path)
        if before is None:
            self._refuse_clash(path)
        self._values[path] = value
        made = (
            None
            if value is None
            else dump_json(value, None if now is None else now.decode("utf-8"))
        )
        self.changed[path] = made
        if path != VALUES and self._read_source(path) == made:
            del self.changed[path]

    def patch(self, path: str, patch: Any) -> None:
        """Makes the file what the filled patch makes of it."""
        now = self.value(path)
        made = apply_patch(now, patch)
        # a file is not begun for a patch that only removes
        if made or now is not None:
            self.put_value(path, made)

    def touches(self, path: str, patch: Any) -> bool:
        """Whether the patch says anything about what stands in the file."""
        if patch is None or self.value(path) is None:
            return patch is None
        return any(
            value is None or self.value_at(path, at) is not ABSENT
            for at, value in leaves_of_patch(patch)
        )

    def put_text(self, path: str, text: str) -> None:
        """Makes the file hold this text. M513, M906 or M914 if that is not a JSON object."""
        if self.value(path) is None:
            self._refuse_clash(path)
        self.changed[path] = text.encode("utf-8", "surrogatepass")
        self._values[path] = self._parsed(path)
        if self._read_source(path) == self.changed[path]:
            del self.changed[path]

    def _refuse_clash(self, path: str) -> None:
        there = [
            p
            for p in (*self._carried, *self.changed)
            if p != VALUES and (p not in self.changed or self.changed[p] is not None)
        ]
        if found := clash([*there, path]):
            refuse_clash(*found)

    def list_files(self, source_files: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """(path, size) of the files that come out, given those of the source."""
        sizes = {
            **dict(source_files),
            **{
                path: None if content is None else len(content)
                for path, content in self.changed.items()
            },
        }
        return sorted(
            (path, size) for path, size in sizes.items() if size is not None and path != VALUES
        )

    def _parsed(self, path: str) -> dict[str, Any] | None:
        if path == VALUES and path not in self.changed:
            return self._source_values()
        raw = self.read_file(path)
        if raw is None:
            if path in self._left_out:
                fail(
                    "M513",
                    f"{printable(path)} is needed, and is not a file that migrate reads",
                    help="it is too large, or a link or pipe",
                )
            return None
        if len(raw) > MAX_READ:
            fail(
                "M513",
                f"{printable(path)} has {len(raw)} bytes, a configuration at most {MAX_READ}",
            )
        value = jsontext.parse(raw, printable(path), floats=True, constants=True)
        if not isinstance(value, dict):
            fail(
                "M513",
                f"{printable(path)} is not a JSON object",
                help="a configuration is `{…}` with names and values",
            )
        # fewer brackets than levels cannot be too deep
        brackets = raw.count(b"{") + raw.count(b"[")
        if brackets > MAX_DEPTH and json_depth(value) > MAX_DEPTH:
            fail("M914", f"{printable(path)}: JSON nested more than {MAX_DEPTH} deep")
        return value
