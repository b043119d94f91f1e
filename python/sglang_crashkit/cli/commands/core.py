"""``sglang-crashkit core``: print what a GPU core holds, as NVIDIA's cuda-gdb reads it."""

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
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Read the core and print it."""
    from sglang_crashkit.capture.cuda_core.reading import core_in_lines, read_cuda_core

    core = read_cuda_core(args.file.resolve())
    if args.json:
        say_json({"cores": [{"path": str(args.file), **core.to_json()}]}, indent=2)
    else:
        say(*(f"GPU {one.number}: {one.name}, {one.sm_type}, {one.sms} SMs" for one in core.devices))
        say(*core_in_lines(core))
    return ExitCode.DONE
