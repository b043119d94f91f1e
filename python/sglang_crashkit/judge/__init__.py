"""Who failed first, what kind of failure or wait it is, in which part of SGLang, and what to do next.

Pure functions over a `model.case.Case`; what they know of SGLang stands in ``knowledge/*.yaml``, which a person can
read and extend. `verdict.judge` asks them all.
"""
