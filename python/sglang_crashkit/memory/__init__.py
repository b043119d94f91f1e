"""Memory that outlives the process that writes it: heartbeats, steps, the journal of requests, log records."""
