"""The crash handler: a small process beside the server that outlives it and keeps the evidence."""
