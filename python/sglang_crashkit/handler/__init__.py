"""The crash handler: a small process beside the server, which gathers the evidence of what happens to it.

`server` takes in messages and exits. `triage` decides what is done about each, `state` has its words, and `session`
carries it out on the incident at hand, which is an `incident.IncidentRun`; `collectors` take the evidence.
`hang_detector` and `peers` notice what nobody reports. `processes` knows the server's own, `folders` where to write.
"""
