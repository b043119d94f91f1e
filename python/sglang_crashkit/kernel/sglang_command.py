"""Tell by its command line whether a process runs SGLang.

What Python runs must be SGLang's, or be called so; the word in another argument says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

#: ``python -m MODULE``, ``python FILE`` or the console script that is SGLang's: a file below a folder of that name,
#: such as a checkout, need not be.
_MODULE = re.compile(r"sglang(?:\.[\w.]+)?")
_SCRIPT = re.compile(r"(?:^|/)sglang(?:/(?:launch_server|bench_\w+|srt/.+|cli/.+)\.py)?$")
#: A module or script of somebody else's with the word in its name.
_CALLED_SO = re.compile(r"(?<![a-z])sglang(?![a-z])")
#: These have no model: what passes requests on to servers, and clients.
_ROUTER = re.compile(r"\bsglang(?:_router\b|\b.*\b(?:launch_router|launch_lb|mini_lb)\b)")
_CLIENT = re.compile(r"\b(?:bench_serving|check_env)\b")
#: Words in the name of what is called so and has none either; this kit is one.
_NO_MODEL = re.compile(
    r"(?<![a-z])(?:crashkit|router|gateway|proxy|lb|clients?|bench\w*|tests?|eval\w*|check_env)(?![a-z])"
)
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")


def runs_sglang(cmdline: Sequence[str]) -> bool:
    """Say whether a command line is that of a Python process that runs a server of SGLang: its own module or script."""
    program = _program_of(cmdline)
    if program is None or _ROUTER.search(program) or _CLIENT.search(program):
        return False
    return bool(_MODULE.fullmatch(program) or _SCRIPT.search(program))


def may_run_sglang(cmdline: Sequence[str]) -> bool:
    """Say whether it does, or is of a Python module or script that is called so, such as ``dynamo.sglang``."""
    program = _program_of(cmdline)
    if program is None:
        return False
    name = Path(program).name
    return runs_sglang(cmdline) or bool(_CALLED_SO.search(name) and not _NO_MODEL.search(name))


def runs_router(cmdline: Sequence[str]) -> bool:
    """Say whether a command line is that of a Python process that passes requests on to SGLang's servers."""
    program = _program_of(cmdline)
    return program is not None and bool(_ROUTER.search(program))


def _program_of(cmdline: Sequence[str]) -> str | None:
    """Return the module or script that Python runs, None where it is not Python or runs neither."""
    words = cmdline[0].split() if len(cmdline) == 1 else cmdline
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    takes_value = False
    for position, word in enumerate(words[1:], start=1):
        if takes_value:
            takes_value = False
        elif word == "-m":
            return words[position + 1] if position + 1 < len(words) else None
        elif word.startswith("-c"):
            return None
        elif word in {"-W", "-X"}:
            takes_value = True
        elif not word.startswith("-"):
            return word
    return None
