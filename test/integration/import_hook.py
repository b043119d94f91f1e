"""Change one module of a real server, in each of its Python processes, once that imports it."""

from __future__ import annotations

from pathlib import Path

_HOOK = """

class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        import importlib.machinery

        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


import sys

sys.meta_path.insert(0, _Finder())
"""


def write_site(folder: Path, module: str, code: str) -> dict[str, str]:
    """Write a ``sitecustomize.py`` into a folder, and return the environment that brings it into a server.

    Args:
        folder: has none yet.
        module: the full name of the module that is to be changed.
        code: runs as each Python process begins; its function ``change`` takes the module as it has just been loaded.
    """
    (folder / "sitecustomize.py").write_text(code + _HOOK.format(module=module))
    return {"PYTHONPATH": str(folder)}
