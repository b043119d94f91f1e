"""The folder of an incident: its contents, its removal, and the verdict."""
