"""The page of the commands and their options, made from the parsers of ``--help``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from lanelib.paths import ROOT

PAGE = ROOT / "docs" / "commands.md"
INTRODUCTION = """\
# Commands

Made by `scripts/options` of what `--help` says. Every command has `--help` with an example, and `--json`
([for programs](json.md)). Colour is used on a terminal only, and not where `NO_COLOR` is set. `INCIDENT` is the folder
of an incident, a crash folder (its newest incident), an id or how that begins, or `latest`.

| exit status of a command | meaning |
| --- | --- |
| 0 | done |
| 1 | failed |
| 2 | usage: the arguments make no sense |
| 3 | nothing to do it on: no such process, incident or installation |
| 4 | refused: a foreign file, an unsupported release, several servers and none named |
| 5 | done in part |
| 130, 143 | interrupted by Ctrl-C, ended by SIGTERM |

The exit statuses of a *server* are in [incidents.md](incidents.md#exit-statuses)."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command's own arguments."""
    from sglang_crashkit.cli.main import load_command

    parser = argparse.ArgumentParser(prog=f"sglang-crashkit {command}", add_help=False)
    load_command(command).configure(parser)
    return parser


def page() -> str:
    """Return ``docs/commands.md``."""
    from sglang_crashkit.cli.main import COMMANDS

    lines = [*INTRODUCTION.splitlines()]
    for command, does in COMMANDS.items():
        parser = parser_of(command)
        lines += ["", f"## {command}", "", f"{does[0].upper()}{does[1:]}.", ""]
        lines += [
            "```",
            *_examples(parser.epilog or ""),
            "```",
            "",
            "| argument | meaning |",
            "| --- | --- |",
            *_rows(parser),
        ]
    return "\n".join(lines) + "\n"


def _examples(epilog: str) -> Iterable[str]:
    return (line.strip() for line in epilog.splitlines() if line.startswith("  "))


def _rows(parser: argparse.ArgumentParser) -> Iterable[str]:
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        names = [f"`{name}{_value_of(action)}`" for name in _names(action)]
        yield f"| {', '.join(names)} | {(action.help or '').replace('|', chr(92) + '|')} |"


def _names(action: argparse.Action) -> Iterable[str]:
    # A positional argument has no option strings: use its metavar or name.
    return action.option_strings or [str(action.metavar or action.dest)]


def _value_of(action: argparse.Action) -> str:
    if not action.option_strings or action.nargs == 0:
        return ""
    value = str(action.metavar or "|".join(map(str, action.choices or [])) or action.dest.upper())
    return f" {value} ..." if action.nargs == "+" else f" {value}"
