"""Real SGLang environments and servers for the tests and the quickstart.

Only the standard library is imported here: this package runs before any virtual environment exists.
"""
