"""The crash handler: a small process beside the server that gathers evidence of the server's failures."""
