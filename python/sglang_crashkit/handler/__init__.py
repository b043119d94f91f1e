"""The crash handler: a small process beside the server, which gathers the evidence of what happens to it."""
