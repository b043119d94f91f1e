"""SGLang's package of one release, read and not run: what is defined, what it calls, and where it calls the kit."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping

from featurelib.kitsource import KitSource

#: Where a top-level statement begins: in the first column, and not with what goes on with the one before.
_BEGIN = re.compile(rb"^(?!(?:else|elif|except|finally)\b)[A-Za-z_@]", re.MULTILINE)
#: What a top-level statement defines or assigns to; decorators stand before it.
_HEAD = re.compile(rb"^(?:(?:async +)?def|class) +(\w+)|\A(\w+)(?: *:[^=\n]+)? *=(?!=)", re.MULTILINE)
_KIT_IMPORT = re.compile(rb"^from sglang\.srt\.crashkit import (?:\([^)]*\)|[^(\n]+)", re.MULTILINE)
#: The file that the other patched files have the kit's functions from.
HOOK_FILE = "srt/crashkit.py"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class SglangFile:
    """One file of the package. Only those of its top-level statements are parsed that are asked for.

    Args:
        text: its bytes; empty where there is no such file.
        kit: the kit's package, None where the kit is not installed.
        hooks: the kit's functions that SGLang's files can ask for; see `read_hooks`.
    """

    def __init__(self, text: bytes, kit: KitSource | None, hooks: Mapping[str, str] | None = None) -> None:
        self._text = text
        self._pieces: dict[str, list[bytes]] = {}
        for piece in _top_level_pieces(text):
            head = _HEAD.search(piece)
            if head:
                self._pieces.setdefault((head.group(1) or head.group(2)).decode(), []).append(piece)
        self._kit_names: dict[str, str] = {}
        #: What is imported from the kit without being there.
        self._broken: set[str] = set()
        for piece in _KIT_IMPORT.findall(text):
            (node,) = ast.parse(piece).body
            assert isinstance(node, ast.ImportFrom)
            for alias in node.names:
                name, target = alias.asname or alias.name, (hooks or {}).get(alias.name)
                if kit is not None and target is not None and kit.has(target):
                    self._kit_names[name] = target
                else:
                    self._broken.add(name)

    def whole(self) -> ast.Module:
        """Return the syntax tree of the whole file."""
        return _parse(self._text)

    def mentions(self, name: str) -> bool:
        """Return whether `name` stands somewhere in the text."""
        return name.encode() in self._text

    def find(self, path: str) -> ast.stmt | None:
        """Return what binds a name for good, None where nothing does.

        Args:
            path: ``function``, ``Class``, ``Class.method``, or a name that something is assigned to in these places.
        """
        first, *inner = path.split(".")
        body = _parse(self._pieces[first][-1]).body if first in self._pieces else []
        for name in (first, *inner):
            bound = [node for node in body if name in _bound_by(node)]
            if not bound or self._is_broken(bound[-1]):
                return None
            found = bound[-1]
            body = getattr(found, "body", [])
        return found

    def definition(self, path: str) -> Definition | None:
        """Return the function or class that binds a name, as `find` does; None where something else binds it."""
        found = self.find(path)
        return found if isinstance(found, Definition) else None

    def taken_over_by(self, path: str) -> frozenset[str]:
        """Return the kit's functions that decorate what binds `path`, or that it is, or whose result it is."""
        node = self.find(path)
        values: list[ast.expr] = []
        if isinstance(node, Definition):
            values = node.decorator_list
        elif isinstance(node, ast.Assign):
            values = [node.value]
        return self._kit_functions([value.func if isinstance(value, ast.Call) else value for value in values])

    def kit_calls(self, node: ast.AST | None) -> frozenset[str]:
        """Return the kit's functions that are called in `node`; None has none."""
        return self._kit_functions([call.func for call in calls_in(node)])

    def _kit_functions(self, nodes: list[ast.expr]) -> frozenset[str]:
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        return frozenset(self._kit_names[name] for name in names & self._kit_names.keys())

    def _is_broken(self, node: ast.stmt) -> bool:
        if not isinstance(node, ast.Assign):
            return False
        value = node.value.func if isinstance(node.value, ast.Call) else node.value
        return isinstance(value, ast.Name) and value.id in self._broken


class SglangTree:
    """The package.

    Args:
        read: returns the bytes of the file at a path below the package, None where there is none.
        kit: the kit's package, None where the kit is not installed.
        entry_points: the text of the distribution's ``entry_points.txt``.
    """

    def __init__(
        self, read: Callable[[str], bytes | None], kit: KitSource | None = None, entry_points: str = ""
    ) -> None:
        self._read = read
        self._files: dict[str, SglangFile] = {}
        self.kit = kit
        self.entry_points = entry_points

    def file(self, path: str) -> SglangFile:
        """Return the file at `path` below the package."""
        if path not in self._files:
            self._files[path] = SglangFile(self._read(path) or b"", self.kit, read_hooks(self._read(HOOK_FILE) or b""))
        return self._files[path]


def read_hooks(text: bytes) -> dict[str, str]:
    """Return the functions that `HOOK_FILE` hands out, by name: each one's dotted name in the kit.

    Args:
        text: its bytes; empty where there is none.
    """
    tables = [node.value for node in _parse(text).body if isinstance(node, ast.Assign) and "_HOOKS" in _bound_by(node)]
    rows = zip(tables[0].keys, tables[0].values, strict=True) if tables and isinstance(tables[0], ast.Dict) else ()
    return {
        str(ast.literal_eval(name)): f"sglang_crashkit.{ast.literal_eval(value.elts[0])}.{ast.literal_eval(name)}"
        for name, value in rows
        if name is not None and isinstance(value, ast.Tuple)
    }


def calls_in(node: ast.AST | None, name: str | None = None) -> list[ast.Call]:
    """Return the calls in `node` in the order of lines.

    Args:
        node: None has none.
        name: only calls of this, as it is written after the last dot.
    """
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)] if node else []
    wanted = [call for call in calls if name is None or called(call) == name]
    return sorted(wanted, key=lambda call: (call.lineno, call.col_offset))


def called(call: ast.Call) -> str:
    """Return what `call` calls, as it is written after the last dot; empty for what has no name."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> object:
    """Return the constant that `call` passes as `name`, None where it passes none."""
    values = [each.value for each in call.keywords if each.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def default_of(function: Definition | None, name: str) -> object:
    """Return the constant that is the default of the argument `name`, None where it is none."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = [*function.args.posonlyargs, *function.args.args]
    defaults = dict(zip([each.arg for each in arguments][::-1], function.args.defaults[::-1], strict=False))
    value = defaults.get(name)
    return value.value if isinstance(value, ast.Constant) else None


def arguments_of(function: Definition | None) -> set[str]:
    """Return the names of the arguments of `function`."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    return {each.arg for each in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]}


def refers_to(node: ast.AST, name: str) -> bool:
    """Return whether `node` uses the variable or function `name`; an import alone is no use."""
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _top_level_pieces(text: bytes) -> Iterator[bytes]:
    """Yield the top-level statements of a module in order.

    A line of a string that looks like a statement cuts the statement before it short, which then does not parse: the
    cut is never wrong in silence.
    """
    begins = [match.start() for match in _BEGIN.finditer(text)]
    decorated: int | None = None
    for begin, end in itertools.zip_longest(begins, begins[1:], fillvalue=len(text)):
        if text.startswith(b"@", begin):
            decorated = begin if decorated is None else decorated
            continue
        yield text[begin if decorated is None else decorated : end]
        decorated = None


def _bound_by(node: ast.AST) -> set[str]:
    if isinstance(node, Definition):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


@functools.lru_cache(maxsize=32)
def _parse(text: bytes) -> ast.Module:
    # Much is the same before and after; nobody changes a tree.
    return ast.parse(text)
