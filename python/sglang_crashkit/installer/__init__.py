"""Puts the kit's patches into an installed SGLang, takes them out, and builds patched wheels.

Imports neither ``sglang`` nor the parts of the kit that run inside a server.
"""
