"""``sglang-crashkit core``: say what a GPU core holds, without cuda-gdb; of two, which kernels are stuck."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sglang_crashkit.errors import ExitCode

_EXAMPLES = """\
examples:
  sglang-crashkit core core.cuda.4711
  sglang-crashkit core core.cuda.first core.cuda.second --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("file", type=Path, help="a core that the CUDA driver wrote, see CUDA_COREDUMP_FILE")
    parser.add_argument("second", type=Path, nargs="?", help="another one of the same process, to compare")
    parser.add_argument("--json", action="store_true", help="print a JSON object, with every single warp")


def run(args: argparse.Namespace) -> ExitCode:
    """Read one or two."""
    from sglang_crashkit.capture.cuda_core.reading import read_cuda_core
    from sglang_crashkit.capture.cuda_core.text import compare, format_core

    paths = [path for path in (args.file, args.second) if path is not None]
    cores = [read_cuda_core(path) for path in paths]
    comparison = compare(*cores) if len(cores) == 2 else None
    if args.json:
        document = {
            "cores": [{"path": str(path), **core.to_json()} for path, core in zip(paths, cores, strict=True)],
            "comparison": comparison.to_json() if comparison else None,
        }
        print(json.dumps(document, indent=2))
        return ExitCode.DONE
    for path, core in zip(paths, cores, strict=True):
        if comparison is not None:
            print(f"{path}:")
        print("\n".join(format_core(core)))
    if comparison is not None:
        for kernel in comparison.kernels:
            print(f"{kernel.outcome} ({kernel.level}): {kernel.text}")
        print(f"verdict ({comparison.level}): {comparison.text}")
    return ExitCode.DONE
