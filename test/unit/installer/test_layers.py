import ast
from pathlib import Path

import pytest

from sglang_crashkit import installer

MODULES = sorted(Path(installer.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_the_installer_needs_nothing_that_runs_in_a_server(module):
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    for name in names:
        package, _, rest = name.partition(".")
        assert package not in ("sglang", "torch")
        if package == "sglang_crashkit":
            assert rest.partition(".")[0] in ("", "errors", "installer"), name
