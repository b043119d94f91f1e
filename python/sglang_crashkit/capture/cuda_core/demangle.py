"""The names of C++ functions as people read them, by the demangler of the C++ runtime.

A name of a damaged or hostile core may cost a demangler any time and memory: a few hundred bytes can stand for more
than a computer holds. So it runs in a process of its own, with limits. Run as a program, it writes the demangled form
of each argument, null where that has none, as one JSON list.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
from collections.abc import Iterable, Sequence

#: What it takes of address space and CPU for the largest names of templates is a small part of these.
_MAX_MEMORY, _MAX_CPU_SECS = 256 << 20, 2
_DEADLINE_SECS = 5.0
#: More than a kernel has arguments for; one of them may have 128 KiB on Linux.
_MAX_NAMES, _MAX_BYTES = 1000, 1 << 20
_RUNTIME = "libstdc++.so.6"


def demangle(names: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return the demangled form of each name that has one, by name, and why there are none; empty where there are."""
    # Imported here: the program needs nothing of the package.
    from sglang_crashkit.capture.tools import run_tool

    mangled = list(dict.fromkeys(name for name in names if name.startswith("_Z") and "\0" not in name))[:_MAX_NAMES]
    if not mangled or sum(map(len, mangled)) > _MAX_BYTES:
        return {}, "they are too long" if mangled else ""
    run = run_tool([sys.executable, "-I", "-S", __file__, *mangled], _DEADLINE_SECS, apart=True)
    if run.reason:
        return {}, run.reason
    try:
        found = json.loads(run.text)
        return {name: text for name, text in zip(mangled, found, strict=True) if isinstance(text, str)}, ""
    except ValueError as error:
        return {}, f"the demangler's answer: {error}"


def main(names: Sequence[str]) -> int:
    """Write the demangled names.

    Raises:
        OSError: this system has no C++ runtime.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_SECS, _MAX_CPU_SECS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Itanium C++ ABI, "__cxa_demangle"; the memory that it returns is left to the end of this process.
    convert = ctypes.CDLL(_RUNTIME).__cxa_demangle
    convert.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p]
    convert.restype = ctypes.c_char_p
    found = (convert(name.encode(errors="surrogateescape"), None, None, None) for name in names)
    json.dump([None if text is None else text.decode(errors="backslashreplace") for text in found], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
