"""Every kind of evidence of an incident, one row each: when it is wanted, what takes it, and until when.

To add a kind, name it in `model.incident.EvidenceKind`, write a function in `collectors/`, and add a row to
`collectors_of`. The function gets the incident and a deadline by the monotonic clock. It adds `Evidence` to the reports
of the incident: captured, failed or skipped, with the reason. What is asked of others, who answer while the crash
handler goes on, it returns as an `Awaited`. One that fails costs no other.

What an event itself brings is no row, and is taken in with the event by `IncidentRun`: how a process ended (``exit``),
what it wrote as it did (``fault_stack``), and the record of one that raised (``exception``).
"""

from __future__ import annotations

import functools
import time

from sglang_crashkit.handler.collectors.gpu import Cores, Driver, FlightRecorders
from sglang_crashkit.handler.collectors.process_evidence import (
    take_native_stacks,
    take_stacks,
    take_states,
    wants_native,
)
from sglang_crashkit.handler.collectors.received import Received
from sglang_crashkit.handler.incident import Collector, IncidentRun, Moment

#: Eight GPUs take less than a second; a driver that takes longer than this hangs. Seconds.
_DRIVER_SECS = 5.0
#: The longest that native stacks may take, in seconds.
_NATIVE_SECS = 5.0
#: What is left of an incident's time for writing it, in seconds.
_WRITING_SECS = 1.0
#: So much of an incident's time is kept for what is held in memory, in seconds, and at most such a share. All of it may
#: take so long, where the incident has that much left; of eight ranks it takes about one.
_KEPT_SECS, _KEPT_SHARE, _MEMORY_SECS = 3.0, 0.25, 6.0
#: Of the time that the server's end has, the share that is left when the GPU cores are read.
_LAST_SHARE = 0.1


def collectors_of(received: Received, driver: Driver) -> tuple[Collector, ...]:
    """Return the table, for the server of which this was received, and its driver."""
    capture, ask, stop, core, write = Moment
    flight_recorders = functools.partial(FlightRecorders, late=set())
    return (
        Collector("process states", capture, lambda run: run.rounds == 0, take_states, _capture_end),
        Collector("stacks", capture, _always, take_stacks, _capture_end),
        Collector("GPU facts", ask, _concerns_gpus, driver.ask, _driver_end),
        # Each recorder has a time of its own within this.
        Collector("flight recorders", ask, _concerns_gpus, flight_recorders, _asked_end),
        Collector("native stacks", stop, wants_native, take_native_stacks, _native_end),
        Collector("GPU cores", core, lambda run: run.is_ending and _concerns_gpus(run), Cores, _cores_end),
        Collector("last signs", write, _always, received.take_last_signs, _memory_end),
        Collector("steps", write, _always, received.steps.take, _memory_end),
        Collector("request journals", write, _always, received.journals.take, _memory_end),
        Collector("pauses", write, _always, lambda run, _: received.pauses.add_to(run.note), _memory_end),
        # They are searched for the prompts of the requests.
        Collector("logs", write, _always, received.logs.take, _memory_end),
        Collector("environment", write, _always, received.environment.take, _memory_end),
    )


def secs_before_memory(budget_secs: float) -> float:
    """Return how long an incident that may take `budget_secs` may wait before it gathers what is held in memory."""
    return budget_secs - min(_KEPT_SECS, _KEPT_SHARE * budget_secs)


def _always(_run: IncidentRun) -> bool:
    return True


def _concerns_gpus(run: IncidentRun) -> bool:
    # These do not concern the server's own GPUs and collectives.
    return run.incident.kind not in ("peer_lost", "snapshot", "thread_died")


def _capture_end(run: IncidentRun, _began: float) -> float:
    return time.monotonic() + run.settings.capture_secs


def _asked_end(run: IncidentRun, _began: float) -> float:
    return run.opened + secs_before_memory(run.settings.budget_secs)


def _driver_end(run: IncidentRun, began: float) -> float:
    return min(began + _DRIVER_SECS, _asked_end(run, began))


def _native_end(run: IncidentRun, began: float) -> float:
    return min(began + _NATIVE_SECS, run.opened + run.settings.budget_secs - _WRITING_SECS)


def _cores_end(run: IncidentRun, _began: float) -> float:
    # All that the server's end waits for began with the incident.
    return run.opened + (1 - _LAST_SHARE) * run.settings.exit_secs


def _memory_end(run: IncidentRun, began: float) -> float:
    # However late it is, what was kept for it is left.
    left_secs = run.opened + run.settings.budget_secs - min(began, _asked_end(run, began))
    now = time.monotonic()
    # As much is left for those that follow.
    return (max(began + min(left_secs, _MEMORY_SECS), now) + now) / 2
