"""How a verdict is shown."""
