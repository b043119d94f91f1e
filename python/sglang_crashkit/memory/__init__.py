"""What outlives a process in memory: heartbeats and the journal of requests."""
