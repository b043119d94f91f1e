"""Take stacks and other evidence from running processes."""
