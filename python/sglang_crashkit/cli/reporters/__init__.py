"""What the commands print, for a person and for a program."""
