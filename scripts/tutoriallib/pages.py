"""The pages of the tutorials: commands of the kit in them, with what each printed.

A page is written by hand but for its output blocks::

    ```console
    $ sglang-crashkit incidents /var/crash/sglang
    what it printed
    ```

What a first screen shows is made of the incident that is kept beside the pages, so that it can be made anew, and
checked, without a server.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lanelib.paths import ROOT
from sglang_crashkit.cli.commands.show import screen_lines
from sglang_crashkit.cli.reporters.incident_text import timeline_lines
from sglang_crashkit.incident.store import StoredIncident

PAGES = ROOT / "docs" / "tutorials"
INCIDENTS = PAGES / "incidents"
#: What the pages call the crash folder, and a folder whose name is as long: lines break at the same places.
SHOWN_FOLDER, REAL_FOLDER = "/var/crash/sglang", "/tmp/ck-tutorials"  # noqa: S108
HOST, MODEL = "node7", "/models/tiny"
#: The command that a first screen is the answer to.
SHOW = f"sglang-crashkit show latest --folder {SHOWN_FOLDER}"
#: Longer outputs are cut off.
MAX_LINES = 26
_BLOCK = re.compile(r"(?<=^```console\n)\$ (sglang-crashkit (?:[^\n\\]|\\\n)*)\n.*?(?=^```$)", re.MULTILINE | re.DOTALL)
_PACKAGES, _SHOWN_PACKAGES = re.compile(r"/[^\s\"']*/site-packages/"), "/venv/lib/python3.11/site-packages/"
_FIRST_PID, _LEAST_PID = 4101, 100
#: Of a process; the first screen needs of its state only whether it is stopped.
_LEFT_OUT = ("evidence", "looks")
_STATE = "State"
#: So many of the last steps of each rank are kept.
_STEPS = 2


def commands_in(page: str) -> list[str]:
    """Return the kit's commands in a page, as they are written there."""
    return [match[1] for match in _BLOCK.finditer(page)]


def filled(page: str, outputs: Mapping[str, str]) -> str:
    """Return a page with what its commands printed; those that `outputs` has not stay as they are."""

    def block(match: re.Match[str]) -> str:
        if match[1] not in outputs:
            return match[0]
        lines = outputs[match[1]].rstrip().splitlines()
        cut = [*lines[:MAX_LINES], "..."] if len(lines) > MAX_LINES + 1 else lines
        return "\n".join([f"$ {match[1]}", *(line.rstrip() for line in cut), ""])

    return _BLOCK.sub(block, page)


def name_of(document: Mapping[str, Any]) -> str:
    """Return the name of an incident's folder."""
    moment = re.sub(r"[-:]|\d{3}(?=Z$)", "", str(document["trigger"]["time"]))
    return f"{moment}-{document['kind']}-{document['id']}"


def screen(document: Mapping[str, Any]) -> str:
    """Return what `SHOW` prints of a kept incident."""
    stored = StoredIncident(Path(SHOWN_FOLDER, HOST, "incidents", name_of(document)), True, dict(document))
    return "\n".join(screen_lines(stored, argparse.Namespace(incident="latest", folder=Path(SHOWN_FOLDER))))


def told_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return what the commands print that need no more than a kept incident, by command."""
    return {SHOW: screen(document), f"{SHOW} --timeline": "\n".join(timeline_lines(document))}


def kept_incident(name: str) -> dict[str, Any]:
    """Return the incident that is kept for a page."""
    document: dict[str, Any] = json.loads((INCIDENTS / f"{name}.json").read_text())
    return document


def keep_incident(name: str, document: Mapping[str, Any], names: Names) -> None:
    """Keep what a first screen needs of an incident.

    Args:
        name: the page's.
        document: see `Incident.to_json`.
        names: what the reader is shown.
    """
    processes = [{k: v for k, v in one.items() if k not in _LEFT_OUT} for one in document["processes"]]
    for one in processes:
        if one.get("state"):
            one["state"] = {_STATE: one["state"].get(_STATE)}
        if one.get("steps"):
            one["steps"] = {**one["steps"], "last": one["steps"]["last"][-_STEPS:]}
    text = json.dumps({**document, "processes": processes}, indent=1)
    INCIDENTS.mkdir(exist_ok=True)
    (INCIDENTS / f"{name}.json").write_text(names.clean(text) + "\n")


class Names:
    """A reader's names in the place of this machine's: of paths and of pids.

    Args:
        document: an incident; see `Incident.to_json`.
        paths: what paths are called, by what they are.
    """

    def __init__(self, document: Mapping[str, Any], paths: Mapping[str, str]) -> None:
        model = (document.get("environment") or {}).get("model")
        self._paths = {**({model: MODEL} if model else {}), **paths, REAL_FOLDER: SHOWN_FOLDER}
        server, handler = document["server"]["pid"], (document.get("handler") or {}).get("pid")
        others = {one["pid"] for one in document["processes"]} | {handler}
        # In a container of its own a server is process 1, which is no name to be replaced.
        pids = [pid for pid in (server, *sorted(others - {server, None})) if pid >= _LEAST_PID]
        self._pids = {str(pid): str(number) for number, pid in enumerate(pids, start=_FIRST_PID)}
        self._of_pid = re.compile(rf"\b(?:{'|'.join(self._pids) or '(?!)'})\b")

    def clean(self, text: str) -> str:
        """Return a text as a reader sees it."""
        for real, shown in self._paths.items():
            text = text.replace(real, shown)
        text = _PACKAGES.sub(_SHOWN_PACKAGES, text)
        return self._of_pid.sub(lambda match: self._pids[match[0]], text)

    def words_of(self, command: str) -> list[str]:
        """Return the words of a page's command, after the first, as they are run here."""
        words = shlex.split(command.replace("\\\n", " "))[1:]
        for real, shown in self._paths.items():
            words = [word.replace(shown, real) for word in words]
        real_pids = {shown: real for real, shown in self._pids.items()}
        return [real_pids.get(word, word) for word in words]
