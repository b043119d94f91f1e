"""Watching one server from outside."""
