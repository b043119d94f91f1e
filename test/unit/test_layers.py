"""What may import what, and what an import costs."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_crashkit

ROOT = Path(sglang_crashkit.__file__).parent
#: What each part may import of the kit beside itself.
TABLE = """
errors
redact
visible
policy
model     errors
kernel    errors redact
settings  kernel
protocol  kernel
memory    errors kernel model redact
analysis  model
judge     analysis model
view      analysis capture errors incident judge kernel model redact visible
sources   errors kernel model redact
capture   errors kernel model settings
incident  analysis errors judge kernel model redact settings sources visible
handler   analysis capture errors incident judge kernel memory model policy protocol redact settings sources
handler   view visible
srt       capture errors incident kernel memory model policy protocol redact settings visible
test      capture errors incident kernel model protocol settings view visible
installer errors
collect   analysis capture errors judge kernel memory model redact settings sources view
replay    errors incident kernel model redact settings
doctor    capture errors incident installer kernel settings
cli       analysis capture collect doctor errors handler incident installer judge kernel model protocol redact replay
cli       settings sources view visible
__main__  cli
"""
ALLOWED: dict[str, set[str]] = {"": set()}
for row in TABLE.strip().splitlines():
    ALLOWED.setdefault(row.split()[0], set()).update(row.split()[1:])
HEAVY = ("sglang", "torch", "numpy", "transformers", "pynvml", "amdsmi")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def imports() -> list[tuple[str, str]]:
    """Return each module with the absolute name of each of its imports, those inside functions included."""
    found = []
    for module, path in modules():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [(module, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                found += [(module, f"{base}.{alias.name}") for alias in node.names]
    return found


def part_of(name: str) -> str:
    """Return the part of the kit that `name` is in, such as ``core``."""
    inner = name.removeprefix("sglang_crashkit").lstrip(".").split(".")[0]
    return inner if (ROOT / inner).is_dir() or (ROOT / f"{inner}.py").is_file() else ""


def test_imports_point_one_way() -> None:
    wrong = [
        (module, name)
        for module, name in imports()
        if name.split(".")[0] == "sglang_crashkit"
        and part_of(name) not in {"", part_of(module)} | ALLOWED[part_of(module)]
    ]
    assert wrong == []


def test_every_part_is_known() -> None:
    assert {part_of(module) for module, _path in modules()} <= ALLOWED.keys()


def test_no_module_imports_sglang_or_torch() -> None:
    wrong = [(module, name) for module, name in imports() if name.split(".")[0] in HEAVY]
    assert wrong == []


@pytest.mark.parametrize("part", sorted(set(ALLOWED) - {"", "__main__"}))
def test_importing_all_of_a_part_loads_neither_sglang_nor_torch(part: str) -> None:
    names = [
        module
        for module, _path in modules()
        if part_of(module) == part and not module.endswith((".__main__", ".probe"))
    ]
    assert names
    code = "import importlib, json, sys\nfor name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
    code += "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(names)], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = json.loads(done.stdout)
    assert "sglang_crashkit" in loaded
    assert not set(HEAVY) & set(loaded)
    # It takes 80 ms of CPU: a page is made by a process of its own.
    assert ("jinja2" in loaded) is (part == "view")


def private_names_in(path: Path) -> set[str]:
    """Return the private names of the kit's modules that a test imports, reads or replaces."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = [node for node in imports if (node.module or "").split(".")[0] == "sglang_crashkit"]
    bound = {name.asname or name.name for node in own for name in node.names}
    found = {name.name for node in own for name in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            target, *names = node.args[:2]
            if isinstance(target, ast.Constant) and str(target.value).startswith("sglang_crashkit."):
                found.add(target.value.rpartition(".")[2])
            elif ast.unparse(target) in bound:
                found |= {name.value for name in names if isinstance(name, ast.Constant)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_no_test_reaches_for_a_private_name_of_the_kit() -> None:
    tests = Path(__file__).parents[1]
    found = {path.relative_to(tests): private_names_in(path) for path in sorted(tests.rglob("*.py"))}
    upstreams = {"_resolve_cuda_coredump_pipe_path", "_handle_crash_dump_env"}
    upstreams |= {"_wait_for_reap_or_raise", "_still_holding_resources", "_wait_for_scheduler_ready"}
    assert {path: names - upstreams for path, names in found.items() if names - upstreams} == {}


IMPORTED = {
    "the protocol": "import sglang_crashkit.protocol",
    "the hooks": "import sglang_crashkit.srt.managers.scheduler",
    "the command line": "from sglang_crashkit.cli.main import build_parser; build_parser(None)",
}
#: What most servers in Python import.
YARDSTICK = "import argparse, asyncio, dataclasses, json, logging, subprocess, tempfile, urllib.request"


def modules_loaded_by(statement: str) -> int:
    code = f"import sys\nbefore = len(sys.modules)\n{statement}\nprint(len(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


@pytest.mark.parametrize("what", IMPORTED)
def test_it_loads_about_as_many_modules_as_most_servers_do(what: str) -> None:
    assert modules_loaded_by(IMPORTED[what]) < 1.5 * modules_loaded_by(YARDSTICK)
