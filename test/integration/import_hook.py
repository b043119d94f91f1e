"""Run code in each Python process of a real server before anything else, and change modules as it imports them."""

from __future__ import annotations

from pathlib import Path

_HOOK = """

import sys


class _Finder:
    def __init__(self, change, modules):
        self.change, self.modules = change, set(modules)

    def find_spec(self, name, path=None, target=None):
        if name not in self.modules:
            return None
        import importlib.machinery

        self.modules.discard(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder(change, {modules!r}))

"""


def write_site(folder: Path, code: str, *modules: str) -> dict[str, str]:
    """Write a ``sitecustomize.py`` into a folder, and return the environment that brings it into a server.

    `code` runs as each Python process begins; its function ``change`` takes each of `modules`, full names, that has
    just been loaded. The folder is made if it is missing. A file that this wrote before is extended.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "sitecustomize.py").open("a") as file:
        file.write(code + (_HOOK.replace("{modules!r}", repr(modules)) if modules else ""))
    return {"PYTHONPATH": str(folder)}
