"""What ``sglang-crashkit watch`` takes of a server that hangs or has crashed, and tells of it.

Of a hang these are stacks, a verdict, and native stacks where they are asked for; of a crash what those do that are
left, without a verdict: who failed first is known by then, and they stand still because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_crashkit.analysis.explain import explain
from sglang_crashkit.analysis.sightings import Sightings
from sglang_crashkit.collect.collection import Collected, Collection, Plan
from sglang_crashkit.errors import CrashkitError, ExitCode
from sglang_crashkit.kernel.discovery import FoundProcess

_HINT = "next: name another folder with --output-dir"


class Capture:
    """One hang's stacks, or those of who is left of a crash.

    Args:
        processes: of whom they are taken; not empty.
        plan: what is taken.
        tell: called with the kind of an event, its text, and more of it by name.
        details: tell all of the verdict.
    """

    def __init__(
        self, processes: Sequence[FoundProcess], plan: Plan, tell: Callable[..., None], *, details: bool
    ) -> None:
        self._processes, self._plan, self._tell, self._details = processes, plan, tell, details
        self._told: tuple[str, str] | None = None

    def take(self) -> ExitCode:
        """Take the snapshots, tell the verdict, and only then run the debugger, which takes minutes.

        Returns:
            DONE where each process gave stacks, else PARTIAL.
        """
        collection = self._take_snapshots()
        if collection is None:
            return ExitCode.PARTIAL
        collected = collection.collected
        files = [*collection.snapshot_files, *_files_of(collected)]
        without = [one.process.title for one in collected if not one.gave_something]
        what = f"{len(collection.rounds)} snapshots of {len(collected)} processes"
        self._tell_files("snapshots", what, files, without)
        self._tell_verdict(collection)
        if self._plan.native:
            self._debug(collection)
        return ExitCode.DONE if all(one.gave_something for one in collected) else ExitCode.PARTIAL

    def _take_snapshots(self) -> Collection | None:
        """Take the snapshots that are planned; None, which is told, where they cannot be written."""
        try:
            collection = Collection(self._processes, self._plan, lambda _line: None)
            collection.take_snapshots()
        except (OSError, CrashkitError) as error:
            self._tell("problem", f"no snapshots in {self._plan.output}: {error}; {_HINT}")
            return None
        return collection

    def take_survivors(self) -> ExitCode:
        """Take one snapshot of those that are left, for they will not be for long.

        Returns:
            DONE where each of them gave stacks, else PARTIAL.
        """
        collection = self._take_snapshots()
        if collection is None:
            return ExitCode.PARTIAL
        collected = collection.collected
        without = [one.process.title for one in collected if not one.gave_something]
        files = [*collection.snapshot_files, *_files_of(collected)]
        self._tell_files("snapshots", f"the stacks of {len(collected)} processes that were left", files, without)
        return ExitCode.PARTIAL if without else ExitCode.DONE

    def _debug(self, collection: Collection) -> None:
        before = _files_of(collection.collected)
        try:
            collection.debug()
        except OSError as error:
            self._tell("problem", f"no native stacks in {self._plan.output}: {error}; {_HINT}")
            return
        collected = collection.collected
        files = [name for name in _files_of(collected) if name not in before]
        if collection.spared:
            self._tell("native_stacks", f"not taken: {collection.spared}", files=files)
            return
        without = [one.process.title for one in collected if one.debugged is None or not one.debugged.threads]
        self._tell_files("native_stacks", f"native stacks of {len(collected) - len(without)} processes", files, without)
        self._tell_verdict(collection)

    def _tell_files(self, kind: str, what: str, files: list[str], without: list[str]) -> None:
        text = f"{what} in {self._plan.output}" + (f"; none of {', '.join(without)}" if without else "")
        self._tell(kind, text, output_dir=str(self._plan.output.absolute()), files=files, missing=without)

    def _tell_verdict(self, collection: Collection) -> None:
        """Tell the verdict, unless it is the one that was told."""
        explanation = explain(Sightings.of(collection.rounds))
        verdict = (explanation.statement, explanation.level)
        if verdict == self._told:
            return
        self._told = verdict
        details = {"explanation": explanation.to_json()} if self._details else {}
        self._tell("verdict", explanation.statement, level=explanation.level, **details)


def _files_of(collected: Sequence[Collected]) -> list[str]:
    return [name for one in collected for name in one.files]
