"""Tell whether a process waits for a compiler that it started.

Torch, FlashInfer, DeepGEMM and TileLang compile kernels while a batch waits for them, for seconds to minutes, by nvcc
or the machine's own compiler.
"""

from __future__ import annotations

from sglang_crashkit.kernel import procfs

#: As the kernel names them, in at most 15 bytes.
_COMPILERS = frozenset(
    {"as", "c++", "cc1", "cc1plus", "cicc", "clang", "clang++", "cmake", "collect2", "cudafe++", "fatbinary", "g++"}
    | {"gcc", "hipcc", "ld", "ld.lld", "lld", "make", "ninja", "nvcc", "nvlink", "ptxas"}
)


def has_compiler(pid: int) -> bool:
    """Say whether a compiler, or a tool that runs some, is among the descendants of a process."""
    for descendant in procfs.TreeScanner(pid).scan() - {pid}:
        stat = procfs.read_stat(descendant)
        if stat is not None and stat.state not in ("Z", "X") and stat.comm in _COMPILERS:
            return True
    return False
