"""What an incident has of the GPUs: cores, kernels, and what the driver says."""
