"""What follows an incident and what is published beside it: notices, a page, metrics; each in a child process."""
