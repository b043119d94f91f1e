"""Print where a python finds SGLang, without importing it, and whether it can import the kit. Runs in that python.

This file's text is passed with ``-c``, so it needs only the standard library. Arguments: what the patches call.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path


def find_sglang() -> dict[str, object]:
    """Return where the metadata and the import system find SGLang, its version, and whether it is editable."""
    found: list[Path] = []
    for entry in sys.path:
        for path in sorted(Path(entry).glob("[Ss][Gg][Ll][Aa][Nn][Gg]-*.dist-info")):
            if path.is_dir() and path.resolve() not in found:
                found.append(path.resolve())
    spec = importlib.util.find_spec("sglang")
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    result: dict[str, object] = {
        "dist_infos": [str(path) for path in found],
        "package_dirs": [str(Path(location).resolve()) for location in locations],
    }
    if found:
        distribution = importlib.metadata.Distribution.at(found[0])
        result["version"] = distribution.metadata["Version"]
        source = {}
        with contextlib.suppress(ValueError):
            source = json.loads(distribution.read_text("direct_url.json") or "{}")
        result["editable"] = source.get("url") if source.get("dir_info", {}).get("editable") else None
    return result


def find_kit(functions: list[str]) -> dict[str, object] | None:
    """Return which kit this python imports and which of `functions` it cannot; None where it imports no kit."""
    try:
        kit = importlib.import_module("sglang_crashkit")
    except ImportError:
        return None
    if kit.__file__ is None:
        # Folders that an uninstalled kit left behind are imported as a namespace package.
        return None
    missing: dict[str, str] = {}
    for name in functions:
        module, _, function = name.rpartition(".")
        try:
            getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            missing[name] = str(error)
    root = Path(str(kit.__file__)).resolve().parents[1]
    return {"version": kit.__version__, "root": str(root), "missing": missing}


def main() -> None:
    """Print the answer as one line of JSON, on the last line: start-up files of that python may print before it."""
    if sys.path and not sys.path[0]:
        del sys.path[0]  # with -c it is the working directory, where a server need not run
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    answer = {
        "has_pip": importlib.util.find_spec("pip") is not None,
        "python_path": [str(Path(part).resolve()) for part in parts if part],
        "sglang": find_sglang(),
        "kit": find_kit(sys.argv[1:]),
    }
    print("\n" + json.dumps(answer))  # noqa: T201 - the answer is read from here


if __name__ == "__main__":
    main()
