"""Judgement: pure functions from a model to a verdict."""
