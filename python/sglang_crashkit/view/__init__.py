"""What the kit shows: typed rows and sections, and what prints them on a terminal, as Markdown and as a page."""
