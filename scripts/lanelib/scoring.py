"""Score the answers of `explain` to a folder of cases: plain evidence with the answer of an expert.

A case is a folder with ``expected.json`` beside the evidence:

- ``class``, ``first``, ``component``: the answer; ``accept``, ``first_accept``, ``component_accept``: other right
  answers. None stands for no process, or for no component.
- ``next_must_mention``: a word of each inner list must be in the headline, the cause or the next steps.
- ``must_not_say``: words that must not be in these, unless the sentence denies them.
- ``level_max``: the highest level that the evidence allows.

An answer is *right* with class, first, component and every mention; *useful* where only the class, or only first and
component, differ; *vague* where its class says only that something failed, or only its class is right; else *wrong*. A
failure where nothing failed is a *false alarm*; *established* with a wrong class or first is *wrong, established*.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = ("right", "useful", "vague", "wrong", "wrong, established", "false alarm")
_LEVELS = ("unknown", "supported", "established")
_CALM = {"no_incident", "asked_to_stop", "busy"}
_VAGUE = {
    *("unknown", "no_progress", "exception", "exception_in_sglang", "startup_failed", "aborted", "exited", "killed"),
    "hang",
}
_DENIALS = {"no", "not", "never", "without", "neither", "isn", "wasn", "nothing", "than", "instead"}
#: How much of an answer an operator reads: steps, characters of a step, characters of headline and cause.
_STEPS, _STEP, _LINE = 8, 240, 300
#: Files with fewer lines than this are not changed: pasted lines have no head and no prefix.
_LONG = 40


@dataclass(frozen=True)
class Row:
    """The score of one case."""

    case: str
    result: str  # one of RESULTS
    short: list[str]  # what the answer lacks, or should not say
    kind: str  # the class that was answered
    restart: bool  # whether the statement about a restart is right
    known: bool  # whether the issue that the case comes from is named


def _plain(text: object) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", str(text).lower()))


def _says(text: str, word: str) -> bool:
    wanted = _plain(word)
    if not wanted:
        return word in text
    plain = _plain(text)
    if len(wanted) > 3:
        return re.search(rf"(?<![a-z0-9]){re.escape(wanted)}", plain) is not None
    return re.search(rf"\b{re.escape(wanted)}\b", plain) is not None or word in text


def _claims(text: str, word: str) -> bool:
    """Say whether a text has the word in a sentence that does not deny it."""
    for sentence in re.split(r"(?<=[.;!?])\s|\n", text):
        if _says(sentence, word):
            before, _, after = _plain(sentence).partition(_plain(word))
            if not _DENIALS & {*before.split()[-4:], *after.split()[:4]}:
                return True
    return False


def _is_named(expected: str | None, answer: str | None) -> bool:
    if expected is None:
        return _plain(answer or "") in ("", "none", "null", "nobody")
    wanted, got = re.findall(r"[a-z]+|\d+", _plain(expected)), re.findall(r"[a-z]+|\d+", _plain(answer or ""))
    return bool(got) and len(got) <= max(8, len(wanted) + 4) and all(part in got for part in wanted)


def score(case: str, wanted: dict[str, Any], verdict: dict[str, Any]) -> Row:
    """Compare an answer with the expert's."""
    kind, level = str(verdict.get("class") or "unknown"), str(verdict.get("level") or "unknown")
    steps = [str(step)[:_STEP] for step in verdict.get("next") or []][:_STEPS]
    said = "\n".join([str(verdict.get("headline"))[:_LINE], str(verdict.get("cause"))[:_LINE], *steps])
    short = []

    classes = [wanted["class"], *wanted.get("accept", [])]
    if not (is_class := kind in classes):
        short.append(f"class {kind}, not {wanted['class']}")
    firsts = [wanted.get("first"), *wanted.get("first_accept", [])]
    if not (is_first := any(_is_named(one, verdict.get("first")) for one in firsts)):
        short.append(f"first {verdict.get('first')}, not {wanted.get('first')}")
    part = _plain(verdict.get("component") or "").split()
    parts = [_plain(one or "").split() for one in [wanted.get("component"), *wanted.get("component_accept", [])]]
    if not (is_part := any(part == one or (one and set(one) <= set(part)) for one in parts)):
        short.append(f"component {verdict.get('component')}, not {wanted.get('component')}")
    missing = [group for group in wanted.get("next_must_mention", []) if not any(_says(said, word) for word in group)]
    short += [f"does not mention {' | '.join(group)[:120]}" for group in missing]
    forbidden = [word for word in wanted.get("must_not_say", []) if _claims(f"{kind}\n{said}", word)]
    short += [f"says {word}" for word in forbidden]
    restarts = [wanted.get("restart_helps"), *wanted.get("restart_accept", [])]
    if not (is_restart := verdict.get("restart_helps") in restarts):
        short.append(f"restart {verdict.get('restart_helps')}, not {wanted.get('restart_helps')}")
    if not (is_level := level in _LEVELS[: _LEVELS.index(wanted.get("level_max", "established")) + 1]):
        short.append(f"level {level}")

    if wanted["class"] in _CALM and kind not in {*_CALM, *classes, "unknown"}:
        result = "false alarm"
    elif level == "established" and not (is_class and is_first):
        result = "wrong, established"
    elif not is_level or forbidden:
        result = "wrong"
    elif is_first and is_part and not missing:
        result = "right" if is_class else "useful"
    elif is_class and not missing:
        result = "useful"
    else:
        result = "vague" if kind in _VAGUE or is_class else "wrong"
    number = re.search(r"(\d+)$", str(wanted.get("report") or ""))
    known = bool(number) and any(str(one["issue"]) == number[1] for one in verdict.get("known_issues") or [])
    return Row(case=case, result=result, short=short, kind=kind, restart=is_restart, known=known)


def cut_head(lines: list[str]) -> list[str]:
    """Return the lines without the first fifth, as in a rotated log."""
    return lines[len(lines) // 5 :]


def colours(lines: list[str]) -> list[str]:
    """Return the lines with every third one coloured, as docker compose prints them."""
    return [f"\x1b[33m{line}\x1b[0m" if place % 3 == 0 and line else line for place, line in enumerate(lines)]


def prefix(lines: list[str]) -> list[str]:
    """Return the lines with a time before each, as ``kubectl logs --timestamps`` prints them."""
    return [
        f"2026-10-05T08:{place // 60 % 60:02d}:{place % 60:02d}.000000000Z {line}" for place, line in enumerate(lines)
    ]


CHANGES: dict[str, Callable[[list[str]], list[str]]] = {"cut-head": cut_head, "colours": colours, "prefix": prefix}


def score_folder(folder: Path, changes: Iterable[str] = (), every: int = 1) -> list[Row]:
    """Explain and score every case below a folder, its files under names that give nothing away.

    Args:
        folder: the folder of cases.
        changes: names in `CHANGES` of changes to the evidence before it is explained.
        every: take only one in this many cases.
    """
    import msgspec

    from sglang_crashkit.judge.verdict import judge
    from sglang_crashkit.model.case import case_of
    from sglang_crashkit.sources.text.reader import read

    rows = []
    for expected in sorted(folder.glob("*/expected.json"))[every // 2 :: every]:
        files = sorted(one for one in expected.parent.iterdir() if one != expected)
        with tempfile.TemporaryDirectory() as temporary:
            copies = [Path(temporary) / f"evidence-{place}" for place in range(len(files))]
            for file, copy in zip(files, copies, strict=True):
                shutil.copyfile(file, copy)
                for change in changes:
                    _change(copy, CHANGES[change])
            verdict = msgspec.to_builtins(judge(case_of(read(copies))))
        rows.append(score(expected.parent.name, json.loads(expected.read_text()), verdict))
    return rows


def _change(file: Path, change: Callable[[list[str]], list[str]]) -> None:
    data = file.read_bytes()
    is_log = b"\0" not in data and b"Thread 0x" not in data and not data.startswith(b"Process ")
    if is_log and data.count(b"\n") > _LONG:
        lines = data.decode(errors="surrogateescape").split("\n")
        file.write_text("\n".join(change(lines)), errors="surrogateescape")


def summary(rows: list[Row]) -> str:
    """Return the totals as one line."""
    counts = Counter(row.result for row in rows)
    results = ", ".join(f"{result} {counts[result]}" for result in RESULTS)
    share = counts["right"] / max(1, len(rows))
    return (
        f"{len(rows)} cases: {results} ({share:.0%} right); restart right {sum(row.restart for row in rows)}; "
        f"its own issue named {sum(row.known for row in rows)}"
    )
