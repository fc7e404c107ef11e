"""Built-in and third-party extensions under one roof: ops, formats, codecs.

A built-in is known by the name of its module file, so listing the names imports nothing and a new
one needs no table. Entry points are scanned only when a name is not built in or when all names are
wanted: the scan costs milliseconds per installed distribution. A third party never replaces a
built-in, and one that fails harms only itself. `MIGRATE_DISABLE_PACKS` leaves third parties out:
all of them, or the distributions that it names.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

# the groups of entry points that are code; rule packs are data
CODE = ("migrate.ops", "migrate.codecs", "migrate.formats")
LEFT_OUT = "MIGRATE_DISABLE_PACKS"
ALL = "all"


class Broken(NamedTuple):
    """A third-party entry that fails: its name, the distribution that declares it, and why."""

    name: str
    distribution: str
    error: str

    def __str__(self) -> str:
        return f"{self.name} of {self.distribution}: {self.error}"


class BrokenEntryError(LookupError):
    """The name exists, but the distribution that declares it cannot deliver; `.broken` says why."""

    def __init__(self, broken: Broken) -> None:
        super().__init__(str(broken))
        self.broken = broken


class Registry(Generic[T]):
    """The objects called `attribute` in the modules of `package`, and entry points of `group`.

    Modules whose name starts with `_` are not entries, nor is `base`, the contract, nor a package,
    which is what entries are made of.
    """

    def __init__(self, package: str, group: str, attribute: str) -> None:
        self.package, self.group, self.attribute = package, group, attribute
        self._loaded: dict[str, T] = {}
        self._broken: dict[tuple[str, str], Broken] = {}
        self._builtin: tuple[str, ...] | None = None
        self._entries: dict[str, EntryPoint] | None = None
        self._lock = threading.RLock()

    def builtin(self) -> tuple[str, ...]:
        """The names of the built-in entries, sorted; imports none of them."""
        if self._builtin is None:
            found = importlib.util.find_spec(self.package)
            where = list(found.submodule_search_locations or ()) if found else []
            self._builtin = tuple(
                sorted(
                    m.name
                    for m in pkgutil.iter_modules(where)
                    if not (m.name.startswith("_") or m.name == "base" or m.ispkg)
                )
            )
        return self._builtin

    def names(self) -> list[str]:
        """All names, built-in and third-party, sorted; imports none of them."""
        return sorted({*self.builtin(), *self._third_party()})

    def get(self, name: str) -> T:
        """The entry called `name`, imported on first use. KeyError, or BrokenEntryError."""
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
            return self._loaded[name]

    def all(self) -> dict[str, T]:
        """Every entry that loads, by name; what does not load is in `broken` afterwards."""
        out = {}
        for name in self.names():
            try:
                out[name] = self.get(name)
            except BrokenEntryError:
                continue
        return out

    @property
    def broken(self) -> tuple[Broken, ...]:
        """The third-party entries found unusable so far, sorted."""
        return tuple(self._broken[k] for k in sorted(self._broken))

    def _load(self, name: str) -> T:
        if name in self.builtin():
            loaded: T = getattr(importlib.import_module(f"{self.package}.{name}"), self.attribute)
            return loaded
        entry = self._third_party().get(name)
        if entry is None:
            raise KeyError(name)
        try:
            loaded = entry.load()
        # importing foreign code may raise anything
        except Exception as error:
            raise BrokenEntryError(
                self._report(entry, f"{type(error).__name__}: {error}")
            ) from error
        return loaded

    def _third_party(self) -> dict[str, EntryPoint]:
        if self._entries is None:
            entries: dict[str, EntryPoint] = {}
            for entry in declared(self.group):
                if entry.name in self.builtin():
                    self._report(entry, "the name is built in")
                elif entry.name not in entries:
                    entries[entry.name] = entry
                elif entry.value != entries[entry.name].value:
                    self._report(
                        entry, f"{distribution_of(entries[entry.name])} declares the same name"
                    )
            self._entries = entries
        return self._entries

    def _report(self, entry: EntryPoint, error: str) -> Broken:
        broken = Broken(entry.name, distribution_of(entry), error)
        self._broken[broken.name, broken.distribution] = broken
        return broken


def declared(group: str) -> list[EntryPoint]:
    """The entry points of a group, sorted by name, distribution and value.

    `importlib.metadata` costs as much as the rest of a small command, and mostly there is nothing
    to find: so the files that would declare the group are looked through as text first.
    """
    without = left_out() if os.environ.get(LEFT_OUT) else []
    if ALL in without or not any(_may_declare(folder, group) for folder in sys.path):
        return []
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group=group) if canonical(distribution_of(e)) not in without]
    return sorted(found, key=lambda e: (e.name, distribution_of(e), e.value))


def left_out() -> list[str]:
    """What `MIGRATE_DISABLE_PACKS` names: distributions, or `all` of them, as which 1 counts."""
    said = os.environ.get(LEFT_OUT, "")
    names = [canonical(word) for word in said.split(",") if word.strip() not in ("", "0")]
    return [ALL] if not {ALL, "1"}.isdisjoint(names) else names


def canonical(name: str) -> str:
    """The name of a distribution as it is compared: `Acme_Rules` is `acme-rules`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _may_declare(folder: str, group: str) -> bool:
    """Whether a distribution in `folder` could declare entries of the group; True where that cannot
    be seen from here.
    """
    place = folder or "."
    try:
        names = os.listdir(place)
    except NotADirectoryError:
        return True  # an archive
    except OSError:
        return False
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            try:
                with open(os.path.join(place, name, "entry_points.txt"), encoding="utf-8") as file:
                    if group in file.read():
                        return True
            except NotADirectoryError:
                return True  # an old single-file egg-info
            except OSError:
                continue
        elif name.endswith(".egg"):
            return True
    return False


def distribution_of(entry: Any) -> str:
    """The name of the distribution that declares an entry point."""
    return entry.dist.name if entry.dist is not None else "unknown distribution"
