"""Says what happened when an SGLang server crashed or hung, in which rank, and where the evidence is."""

__version__ = "1.0.0"
