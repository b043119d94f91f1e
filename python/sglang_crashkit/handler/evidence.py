"""Every kind of evidence of an incident, one row each: at which moment it is taken, by what, and of which incidents.

To add a kind, name it in `model.incident.EvidenceKind`, write a function in `collectors/`, and add a row to
`collectors_of`. The function gets the incident and a deadline by the monotonic clock. It adds `Evidence` to the reports
of the incident: captured, failed or skipped, with the reason. What is asked of others, who answer while the crash
handler goes on, it returns as an `Awaited`. One that fails costs no other.

What an event itself brings is no row, and is taken in with the event by `IncidentRun`: how a process ended (``exit``),
what it wrote as it did (``fault_stack``), and the record of one that raised (``exception``).
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
    """Return the table, for the server of which this was received, and its driver."""
    capture, ask, stop, core, write = Moment
    flight_recorders = functools.partial(FlightRecorders, late=set())
    return (
        Collector("process states", capture, take_states, lambda run: run.rounds == 0),
        Collector("stacks", capture, take_stacks),
        Collector("GPU facts", ask, driver.ask, lambda run: run.concerns_ranks),
        # Each recorder has a time of its own within that of the moment.
        Collector("flight recorders", ask, flight_recorders, lambda run: run.concerns_ranks),
        Collector("native stacks", stop, take_native_stacks, wants_native),
        Collector("GPU cores", core, Cores, lambda run: run.is_ending and run.concerns_ranks),
        Collector("last signs", write, received.take_last_signs),
        Collector("steps", write, received.steps.take),
        Collector("request journals", write, received.journals.take),
        Collector("pauses", write, lambda run, _: received.pauses.add_to(run.incident.note)),
        # They are searched for the prompts of the requests.
        Collector("logs", write, received.logs.take),
        Collector("environment", write, received.environment.take),
    )
