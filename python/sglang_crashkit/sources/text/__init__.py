"""Parsers of what people have who have no kit: logs, stacks, tracebacks, kernel lines, what Kubernetes says."""
