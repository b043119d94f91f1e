"""What an incident asks of the GPUs: the driver and the flight recorders while others look on, at its end the cores."""

from __future__ import annotations

import time

from sglang_crashkit.handler.collectors.flight import FlightRecorders, ask_flight_recorders
from sglang_crashkit.handler.collectors.gpu.cores import Cores
from sglang_crashkit.handler.collectors.gpu.facts import DriverFacts
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.settings import Settings

#: Incidents of a server that goes on, or that had not got so far as to use its GPUs.
_WITHOUT_CORES = frozenset({"failed_start", "peer_lost", "snapshot"})


class GpuEvidence:
    """The GPUs' part of one incident after another.

    Args:
        tree: the server's processes.
        place: where they say how they are asked.
        settings: how long that may take.
    """

    def __init__(self, tree: ProcessTree, place: Place, settings: Settings) -> None:
        self._tree = tree
        self._place = place
        self._settings = settings
        self._flight: FlightRecorders | None = None
        self._cores: Cores | None = None
        self._driver = DriverFacts(tree, settings)
        self._late_flight: set[int] = set()
        self._is_finishing = False

    @property
    def writing_cores(self) -> frozenset[int]:
        """The processes that write a GPU core now, and are neither signalled nor stopped meanwhile."""
        return self._cores.writing if self._cores is not None else frozenset()

    @property
    def are_awaited(self) -> bool:
        """Whether the incident would be finished but for them."""
        return self._are_cores_under_way or (self._is_finishing and self._are_answers_under_way)

    @property
    def are_cores_asked(self) -> bool:
        """Whether it came to the cores, which are the last."""
        return self._cores is not None

    @property
    def cores_secs_left(self) -> float | None:
        """How long the cores may take from now on, in seconds; None where none is awaited."""
        if self._cores is None or self._cores.are_done:
            return None
        return max(0.0, self._cores.deadline - time.monotonic())

    def next_due(self) -> float:
        """Return when `look` has something to do, by the monotonic clock."""
        if self._cores is not None and self._are_cores_under_way:
            return self._cores.next_due()
        flight = self._flight.next_due() if self._flight is not None else float("inf")
        return min(flight, self._driver.next_due())

    def look(self) -> None:
        """See what is whole by now."""
        if self._cores is not None and self._are_cores_under_way:
            self._cores.look()
            return
        self._driver.look()
        if self._flight is not None:
            self._flight.look()

    def watch(self) -> None:
        """Begin to watch for what the driver tells only once."""
        self._driver.watch()

    def close(self) -> None:
        """Watch no longer."""
        self._driver.close()

    def ask(self, run: IncidentRun) -> None:
        """Ask the driver what it knows, and the schedulers for their flight recorders, once an incident."""
        if self._flight is None:
            self._driver.ask(run)
            secs = self._settings.budget_secs
            self._flight = ask_flight_recorders(run, self._tree, self._place.runtime, secs, self._late_flight)

    def have_answered(self, run: IncidentRun) -> bool:
        """Say whether both have, so that the end of the incident waits for neither; ask where nobody did."""
        self._is_finishing = True
        self.ask(run)
        return not self._are_answers_under_way

    def are_cores_done(self, run: IncidentRun, *, of_living: bool, of_dead: bool) -> bool:
        """Say whether no core is awaited any more; ask where nobody did.

        Args:
            run: the incident.
            of_living: whether the living schedulers' GPUs are of interest: the server did not go on, and is not gone.
            of_dead: whether those are which the driver may have written before a scheduler ended.
        """
        if self._cores is None:
            of_living = of_living and run.incident.kind not in _WITHOUT_CORES
            living = [process for process in self._tree.alive() if of_living and process.role == "scheduler"]
            dead = [process for process in self._tree if of_dead and _is_dead_scheduler(process)]
            self._cores = Cores(run, living, dead, self._settings)
        return not self._are_cores_under_way

    def give_up_cores(self, reason: str) -> None:
        """Wait for no core any longer, for a reason that is noted."""
        if self._cores is not None and self._are_cores_under_way:
            self._cores.give_up(reason)

    def give_up_answers(self, reason: str) -> None:
        """Wait for neither the driver nor a flight recorder any longer, for a reason that is noted."""
        self._driver.give_up(reason)
        if self._flight is not None:
            self._flight.give_up(reason)

    def forget(self) -> None:
        """Be ready for the next incident."""
        self._flight = self._cores = None
        self._driver.forget()
        self._is_finishing = False

    @property
    def _are_cores_under_way(self) -> bool:
        return self._cores is not None and not self._cores.are_done

    @property
    def _are_answers_under_way(self) -> bool:
        return not self._driver.is_done or (self._flight is not None and not self._flight.are_done)


def _is_dead_scheduler(process: TrackedProcess) -> bool:
    return process.role == "scheduler" and process.exited_at is not None
