"""Change modules of a real server, in each of its Python processes, as that imports them."""

from __future__ import annotations

from pathlib import Path

_HOOK = """

class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in {modules!r} or name in self.found:
            return None
        import importlib.machinery

        self.found.add(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec

    found = set()


import sys

sys.meta_path.insert(0, _Finder())
"""


def write_site(folder: Path, code: str, *modules: str) -> dict[str, str]:
    """Write a ``sitecustomize.py`` into a folder, and return the environment that brings it into a server.

    Args:
        folder: has none yet.
        code: runs as each Python process begins; its function ``change`` takes a module that has just been loaded.
        modules: full names of those that are to be changed.
    """
    (folder / "sitecustomize.py").write_text(code + _HOOK.format(modules=modules))
    return {"PYTHONPATH": str(folder)}
