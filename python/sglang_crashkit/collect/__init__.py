"""The stacks of all servers of a host or of a Slurm job, and what they say."""
