"""``sglang-crashkit core``: say what a GPU core holds, without cuda-gdb."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import ExitCode

_EXAMPLES = """\
examples:
  sglang-crashkit core core.cuda.4711
  sglang-crashkit core core.cuda.4711 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("file", type=Path, help="a core that the CUDA driver wrote, see CUDA_COREDUMP_FILE")
    parser.add_argument("--json", action="store_true", help="print a JSON object, with every single warp")


def run(args: argparse.Namespace) -> ExitCode:
    """Read it."""
    from sglang_crashkit.capture.cuda_core.reading import read_cuda_core
    from sglang_crashkit.capture.cuda_core.text import format_core

    core = read_cuda_core(args.file)
    if args.json:
        say_json({"cores": [{"path": str(args.file), **core.to_json()}]}, indent=2)
    else:
        say(*format_core(core))
    return ExitCode.DONE
