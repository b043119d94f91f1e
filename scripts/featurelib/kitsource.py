"""The kit's own package, read and not run: which functions it has, and what each of them comes to use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ENTRY_POINT = re.compile(r"^\[project\.entry-points\.pytest11\]\n\w+ = \"([\w.]+)\"", re.MULTILINE)
_ANNOTATIONS = ("annotation", "returns")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Reach:
    """What functions use, by themselves and by way of the kit's functions and classes that they use.

    It errs on the side of too much: whatever is mentioned counts as used, and of a class every method.

    Attributes:
        names: dotted names, of the kit and of others, such as ``os.killpg``.
        attributes: names of attributes, whatever they are attributes of.
        constants: strings and numbers.
    """

    names: frozenset[str]
    attributes: frozenset[str]
    constants: frozenset[object]


class _Module:
    """One module: its top-level bindings, and what its names stand for."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name = name
        self.bindings: dict[str, ast.stmt] = {}
        for statement in tree.body:
            if isinstance(statement, _DEFINITIONS):
                self.bindings[statement.name] = statement
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                self.bindings |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
        self.imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.imported |= {(alias.asname or alias.name).split(".")[0]: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def resolve(self, node: ast.AST) -> str | None:
        """Return the dotted name that `node` stands for, None where it is none that is known here."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        if node.id in self.bindings:
            return ".".join((self.name, node.id, *attributes))
        if node.id in self.imported:
            return ".".join((self.imported[node.id], *attributes))
        return None


class KitSource:
    """The source of the package.

    Args:
        root: the folder of the package.
        pyproject: the text of the ``pyproject.toml`` it is built with.
    """

    def __init__(self, root: Path, pyproject: str = "") -> None:
        self._root = root
        self._pyproject = pyproject
        self._modules: dict[str, _Module | None] = {}
        self._reached: dict[frozenset[str], Reach] = {}

    def has(self, dotted: str) -> bool:
        """Return whether the kit has a module, or a function or class at the top of a module, called `dotted`."""
        return self._module(dotted) is not None or self._locate(dotted)[1] is not None

    def functions(self, module: str) -> set[str]:
        """Return the names of the functions at the top of `module`, none where there is no such module."""
        found = self._module(module)
        bindings = found.bindings.items() if found else ()
        return {name for name, node in bindings if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

    def strings(self, dotted: str) -> set[str]:
        """Return the strings in the value of the top-level name `dotted`, none where there is no such name."""
        node = self._locate(dotted)[1]
        values = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)] if node else []
        return {value for value in values if isinstance(value, str)}

    def pytest_plugin(self) -> str | None:
        """Return the dotted name of the module that pytest loads as a plugin, None where there is none."""
        match = _ENTRY_POINT.search(self._pyproject)
        return match.group(1) if match and self._module(match.group(1)) else None

    def reach(self, *starts: str) -> Reach:
        """Return what the functions called `starts` use between them."""
        key = frozenset(starts)
        if key not in self._reached:
            self._reached[key] = self._follow(list(starts))
        return self._reached[key]

    def _follow(self, todo: list[str]) -> Reach:
        names: set[str] = set()
        attributes: set[str] = set()
        constants: set[object] = set()
        while todo:
            dotted = todo.pop()
            if dotted in names:
                continue
            names.add(dotted)
            module, definition = self._locate(dotted)
            if module is None or definition is None:
                continue
            for node in _without_annotations(definition):
                if isinstance(node, ast.Constant):
                    constants.add(node.value)
                elif isinstance(node, ast.Name | ast.Attribute):
                    if isinstance(node, ast.Attribute):
                        attributes.add(node.attr)
                    resolved = module.resolve(node)
                    todo += [resolved] if resolved else []
        return Reach(frozenset(names), frozenset(attributes), frozenset(constants))

    def _locate(self, dotted: str) -> tuple[_Module | None, ast.stmt | None]:
        """Return the module of `dotted` and what it calls so; of a method, its class."""
        parts = dotted.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module = self._module(".".join(parts[:length]))
            if module is not None:
                return module, module.bindings.get(parts[length])
        return None, None

    def _module(self, dotted: str) -> _Module | None:
        if dotted not in self._modules:
            package, *inner = dotted.split(".")
            path = self._root.joinpath(*inner)
            files = (path / "__init__.py", path.with_suffix(".py")) if package == self._root.name else ()
            file = next((file for file in files if file.is_file()), None)
            self._modules[dotted] = _Module(dotted, ast.parse(file.read_bytes())) if file else None
        return self._modules[dotted]


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for field, value in ast.iter_fields(node):
        if field in _ANNOTATIONS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _without_annotations(child)
