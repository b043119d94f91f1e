"""The kinds of evidence of an incident, one row each: the moment at which it is taken, its function, and its condition.

To add a kind, name it in `model.incident.EvidenceKind`, write a function in `collectors/`, and add a row to
`collectors_of`. The function gets the incident and a deadline by the monotonic clock. It adds `Evidence` to the reports
of the incident: captured, failed or skipped, with the reason. If it asks other processes, which answer while the crash
handler does other work, it returns an `Awaited`. If one function fails, the others still run.

Evidence that comes with an event has no row; `IncidentRun` adds it with the event: how a process ended (``exit``), the
fault dump that it wrote (``fault_stack``), and the record of its exception (``exception``).
"""

from __future__ import annotations

import functools

from sglang_crashkit.handler.collectors.gpu import Cores, Driver, FlightRecorders
from sglang_crashkit.handler.collectors.process_evidence import (
    take_native_stacks,
    take_stacks,
    take_states,
    wants_native,
)
from sglang_crashkit.handler.collectors.received import Received
from sglang_crashkit.handler.incident_run import Collector, Moment


def collectors_of(received: Received, driver: Driver) -> tuple[Collector, ...]:
    """Return the table for one server: `received` has the messages of its processes, `driver` asks its GPUs' driver."""
    capture, ask, stop, core, write = Moment
    flight_recorders = functools.partial(FlightRecorders, late=set())
    return (
        Collector("process states", capture, take_states, lambda run: run.rounds == 0),
        Collector("stacks", capture, take_stacks),
        Collector("GPU facts", ask, driver.ask, lambda run: run.concerns_ranks),
        # Each recorder has its own time limit within that of the moment.
        Collector("flight recorders", ask, flight_recorders, lambda run: run.concerns_ranks),
        Collector("native stacks", stop, take_native_stacks, wants_native),
        Collector("GPU cores", core, Cores, lambda run: run.is_ending and run.concerns_ranks),
        Collector("last signs", write, received.take_last_signs),
        Collector("steps", write, received.steps.take),
        Collector("request journals", write, received.journals.take),
        Collector("pauses", write, lambda run, _: received.pauses.add_to(run.incident.note)),
        # After the journals: logs are redacted by the prompts of the requests.
        Collector("logs", write, received.logs.take),
        Collector("environment", write, received.environment.take),
    )
