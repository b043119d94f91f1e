"""Access to processes, files and signals through the Linux kernel."""
