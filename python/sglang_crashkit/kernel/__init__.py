"""What the kernel says of processes and files, and what is asked of it."""
