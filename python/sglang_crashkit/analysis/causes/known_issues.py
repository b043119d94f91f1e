"""Upstream's issues by which a failure is known already: ``known_issues.yaml`` beside this module.

An entry is claimed where all of its conditions hold: ``error``, the pattern that the exception of the first failure
begins with (its class without the module, and its text); ``frames``, patterns of places that it came through; of a hang
(``hang: true``), in which a process stands, or each rank (``all_ranks: true``); ``arguments``, patterns of the server's
arguments, such as ``--speculative-algorithm=EAGLE*``. A release from ``fixed_in`` on does not have the issue, nor one
before ``since``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import resources
from typing import Any

from sglang_crashkit.analysis.causes.case import Case
from sglang_crashkit.analysis.causes.no_progress import hangs_by_itself

_FILE = "known_issues.yaml"
#: An entry's frame in which a rank waits for the others.
_COLLECTIVE = re.compile(r"all_reduce|all_gather|broadcast")


@dataclass(frozen=True)
class KnownIssue:
    """An issue of upstream's, and how it shows."""

    issue: int  # its number in sgl-project/sglang; an issue or a pull request
    title: str  # what it is, in words of our own
    error: str = ""  # pattern of the exception; empty where any, or none, will do
    frames: tuple[str, ...] = ()  # patterns of places, each of which is among the exception's
    arguments: tuple[str, ...] = ()  # patterns of arguments, each of which the server was given
    hang: bool = False  # it shows as a hang, and the frames are those of a process that does not go on
    all_ranks: bool = False  # of a hang: no rank is anywhere else
    by_request: bool = False  # one request of a client's brings it about
    since: str | None = None  # the first release that has it; None where that is not known
    fixed_in: str | None = None  # the first release without it; None where none is known
    workaround: str | None = None  # what helps until then; None where nothing is known to

    def applies_to(self, case: Case) -> bool:
        """Say whether an incident shows it."""
        release = _parts(case.release)
        if (self.fixed_in and release >= _parts(self.fixed_in)) or (self.since and release < _parts(self.since)):
            return False
        if not all(any(fnmatchcase(given, wanted) for given in case.arguments) for wanted in self.arguments):
            return False
        if self.hang:
            # Others that wait for one show nothing but that; it may be a rank of another node.
            if case.has_other_nodes and any(map(_COLLECTIVE.search, self.frames)):
                return False
            its = [case.first] if hangs_by_itself(case) else case.schedulers if self.all_ranks else case.processes
            found = [_are_in(self.frames, case.doing(process)) for process in its]
            return case.is_hang and any(found) and (all(found) or not self.all_ranks)
        error = case.error
        return error is not None and bool(re.match(self.error, error.line)) and _are_in(self.frames, error.places)

    def to_json(self) -> dict[str, Any]:
        """Return what an incident tells of it."""
        return {
            "issue": self.issue,
            "title": self.title,
            "fixed_in": self.fixed_in,
            "workaround": self.workaround,
        }


def _are_in(patterns: Iterable[str], places: Sequence[str]) -> bool:
    return all(any(fnmatchcase(place, pattern) for place in places) for pattern in patterns)


def _parts(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release.partition("+")[0]))


def matching(issues: Iterable[KnownIssue], case: Case) -> list[KnownIssue]:
    """Return the issues that an incident shows, those with the most conditions first."""
    found = [issue for issue in issues if issue.applies_to(case)]
    return sorted(found, key=lambda issue: -len(issue.frames) - len(issue.arguments) - len(issue.error) / 1000)


@lru_cache(maxsize=1)
def load_issues() -> tuple[KnownIssue, ...]:
    """Return the entries of the data file.

    Raises:
        OSError: it is not there.
        yaml.YAMLError: it is no YAML.
        TypeError: an entry has a field that is unknown, or lacks one.
        ValueError: a pattern is none.
    """
    import yaml

    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(_entry(fields) for fields in yaml.load(text, Loader=loader))  # noqa: S506 - both are safe loaders


def _entry(fields: Mapping[str, Any]) -> KnownIssue:
    try:
        re.compile(str(fields.get("error", "")))
    except re.error as error:
        raise ValueError(f"issue {fields.get('issue')} in {_FILE}: {error}") from error
    lists = {name: tuple(fields[name]) for name in ("frames", "arguments") if name in fields}
    return KnownIssue(**{**fields, **lists})
