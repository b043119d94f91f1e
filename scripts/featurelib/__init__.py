"""Which crash features a release of SGLang has, found by reading its source: as published, and patched.

Nothing of SGLang and nothing of the kit that runs in it is imported here.
"""
