"""Collect and judge the stacks of all servers of a host or of a Slurm job."""
