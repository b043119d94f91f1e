"""Parsers of evidence in text: logs, stacks, tracebacks, kernel lines, and the output of Kubernetes and Docker."""
