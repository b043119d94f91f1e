"""Finds what failed first, why, in which part of SGLang, and the next steps: pure functions of a `model.case.Case`.

Knowledge about SGLang is in ``knowledge/*.yaml``, which can be extended. `verdict.judge` calls all parts.
"""
