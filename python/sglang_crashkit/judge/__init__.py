"""Who failed first, of what, in which part of SGLang, and what to do next: pure functions over a `model.case.Case`.

What they know of SGLang stands in ``knowledge/*.yaml``, to be read and extended. `verdict.judge` asks them all.
"""
