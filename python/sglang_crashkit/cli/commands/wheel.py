"""``sglang-crashkit wheel``: build a patched SGLang wheel, with the kit's own beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import CrashkitError, ExitCode, UsageError

_EXAMPLES = """\
examples:
  sglang-crashkit wheel 0.5.23 -o wheels --download
  sglang-crashkit wheel sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl -o wheels --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("source", metavar="RELEASE_OR_WHEEL", help="0.5.23, or the path of upstream's wheel")
    parser.add_argument("-o", "--out", metavar="DIR", type=Path, required=True, help="folder for both wheels")
    parser.add_argument("--download", action="store_true", help="let pip download a wheel that is not in the cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Build both wheels and print how to install them."""
    from sglang_crashkit.installer.patches import PatchTree, find_patch_root, is_release, load_lock
    from sglang_crashkit.installer.wheel import (
        build_kit_wheel,
        build_patched_wheel,
        find_wheel,
        install_command,
        release_of,
    )

    root = find_patch_root()
    lock = load_lock(root)
    given = Path(args.source)
    if is_release(args.source):
        known = lock.require(args.source).wheels
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        wheel = find_wheel(args.source, known, download=args.download, python_tag=tag)
    elif given.is_file():
        wheel = given
    else:
        raise UsageError(
            f"{args.source} is neither a release of SGLang nor a wheel that is there",
            next_step="sglang-crashkit wheel 0.5.23 -o DIR --download",
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        patched = build_patched_wheel(wheel, args.out, PatchTree.load(root), lock)
        kit = build_kit_wheel(args.out)
    except OSError as error:
        raise CrashkitError(f"cannot build the wheel: {error}") from error
    release = release_of(wheel)
    is_locked, command = wheel.name in lock.require(release).wheels, install_command(args.out, release)
    if args.json:
        told = {"release": release, "wheel": str(patched), "kit": str(kit), "install": command, "locked": is_locked}
        say_json(told, indent=1)
        return ExitCode.DONE
    if not is_locked:
        say(f"{wheel.name}: its own sha256 is not in the lock; RECORD and every patched file were checked")
    say(patched, kit, f"install  {command}")
    return ExitCode.DONE
