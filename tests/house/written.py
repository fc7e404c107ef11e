"""The package as it is written: what each module imports and which classes it has, read only."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# words that say nothing of what they name
EMPTY_WORDS = {"found", "made", "there", "held"}
# what a public function returns where its answer has no type of its own
BARE = {"dict", "dict[str, Any]", "dict[str, object]", "Mapping[str, Any]", "Mapping[str, object]"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands below the node but for expressions, in which no statement stands."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


class Module:
    """One source file: `name` with its dots, `package` that it lies in, and its syntax tree."""

    def __init__(self, root: Path, file: Path) -> None:
        parts = file.relative_to(root).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.package = self.name if self.is_package else self.name.rpartition(".")[0]
        self.tree = ast.parse(file.read_text(encoding="utf-8"), str(file))

    def imports(self, names: Iterable[str]) -> Iterator[str]:
        """The modules among `names` that it imports, in functions and under TYPE_CHECKING too."""
        for node in statements(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in names)
            elif isinstance(node, ast.ImportFrom):
                base = (
                    self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
                    if node.level
                    else []
                )
                home = ".".join([*base, *(node.module.split(".") if node.module else [])])
                for alias in node.names:
                    # `from .a import b` is an import of the module b, if there is one
                    yield from (
                        name
                        for name in (f"{home}.{alias.name}", home)
                        if name in names and name == first(names, home, alias.name)
                    )

    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]


def first(names: Iterable[str], home: str, name: str) -> str:
    return f"{home}.{name}" if f"{home}.{name}" in names else home


@functools.cache
def modules(root: Path = ROOT) -> dict[str, Module]:
    found = (Module(root, file) for file in sorted((root / "migrate").rglob("*.py")))
    return {module.name: module for module in found}


def shared_class_names(package: Mapping[str, Module]) -> list[str]:
    homes = defaultdict(list)
    for module in package.values():
        for node in module.classes():
            homes[node.name].append(module.name)
    return sorted(name for name, where in homes.items() if len(where) > 1)


def circles(package: Mapping[str, Module]) -> list[str]:
    """The modules that reach themselves by imports through others (strong components)."""
    below = {name: set(module.imports(package.keys())) - {name} for name, module in package.items()}
    order: dict[str, int] = {}
    least: dict[str, int] = {}
    path: list[str] = []
    out = []

    def visit(name: str) -> None:
        order[name] = least[name] = len(order)
        path.append(name)
        for other in sorted(below[name]):
            if other not in order:
                visit(other)
            if other in path:
                least[name] = min(least[name], least[other])
        if least[name] == order[name]:
            group = [path.pop()]
            while group[-1] != name:
                group.append(path.pop())
            if len(group) > 1:
                out.extend(group)

    for name in sorted(below):
        if name not in order:
            visit(name)
    return sorted(out)


def private_imports(package: Mapping[str, Module]) -> list[str]:
    """Imports of underscore modules from outside of the package that they lie in."""
    out = set()
    for module in package.values():
        for other in module.imports(package.keys()):
            parts = other.split(".")
            hidden = next(
                (
                    n
                    for n, part in enumerate(parts)
                    if part.startswith("_") and not part.startswith("__")
                ),
                None,
            )
            home = ".".join(parts[:hidden])
            if (
                hidden is not None
                and module.package != home
                and not module.package.startswith(f"{home}.")
            ):
                out.add(f"{module.name} imports {other}")
    return sorted(out)


def bare_answers(package: Mapping[str, Module]) -> list[str]:
    """The functions of `migrate.__all__` that are annotated to return a dict of anything."""
    out = set()
    for name, home in homes(package).items():
        for returned in answers(package, f"migrate.{home}", name):
            if {part.strip(" '\"") for part in returned.split("|")} & BARE:
                out.add(name)
    return sorted(out)


def answers(package: Mapping[str, Module], home: str, name: str) -> Iterator[str]:
    """What the function is annotated to return, in each overload, where it is defined."""
    module = package[home]
    for node in module.tree.body:
        if isinstance(node, FUNCTION) and node.name == name and node.returns is not None:
            yield ast.unparse(node.returns)
        elif isinstance(node, ast.ImportFrom) and name in [
            alias.asname or alias.name for alias in node.names
        ]:
            base = module.package.split(".")[: len(module.package.split(".")) - node.level + 1]
            yield from answers(package, ".".join([*base, node.module or ""]), name)


def homes(package: Mapping[str, Module]) -> dict[str, str]:
    """Public name -> module below `migrate` that it is loaded from."""
    for node in package["migrate"].tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise AssertionError("migrate/__init__.py names no homes")


def empty_names(package: Mapping[str, Module]) -> list[str]:
    """Parameters and attributes of public classes that are called by an empty word."""
    out = set()
    for module in package.values():
        for one in module.classes():
            if not one.name.startswith("_"):
                out |= {
                    f"{module.name}.{one.name}: {name}"
                    for name in called(one)
                    if name in EMPTY_WORDS
                }
    return sorted(out)


def called(one: ast.ClassDef) -> Iterator[str]:
    """What users of the class see: fields, attributes of `self`, methods and parameters."""
    for node in one.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, FUNCTION):
            yield node.name
            if not node.name.startswith("_") or node.name.startswith("__"):
                given = node.args
                yield from (a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs))
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and ast.unparse(inner.value) == "self"
                ):
                    yield inner.attr


CHECKS = {
    "class": shared_class_names,
    "circle": circles,
    "private": private_imports,
    "dict": bare_answers,
    "word": empty_names,
}
