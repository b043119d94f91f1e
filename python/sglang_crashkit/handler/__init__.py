"""The crash handler: a small process beside the server, which gathers the evidence of what happens to it.

`server` takes in messages and exits, and hands them to `session`. There `triage`, whose words are in `state`, decides
what is done about each, and it is carried out on the incident at hand, an `incident.IncidentRun`. `collectors` take the
evidence, also out of what the server's processes share with this one; `findings` is what follows from it, and
`reporting` tells who waits and who wants to know. `hang_detector` notices what nobody reports, `lost_peers` takes what
ranks report of a pair. `processes` knows the server's own, `folders` where to write and what a killed server leaves.
`metrics` tells Prometheus.
"""
