"""The crash handler: a small process beside the server, which gathers the evidence of what happens to it.

`server` receives messages and exits, and hands them to `session`. `session` asks `triage` what to do about each, and
does it to the current incident, an `incident.IncidentRun`. `evidence` is the table of what an incident collects, by the
functions in `collectors`, also out of memory that the server's processes share with this one. `conclusion` is what
follows from it; `notices` tells who waits and who wants to know. `hang_detector` notices what no process reports, by
the `heartbeats`. `processes` knows the server's own, `folders` where to write, and `unfinished` finishes what an
earlier handler left. `metrics` tells Prometheus.
"""
