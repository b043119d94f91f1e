"""What the kit knows of processes, stacks and incidents: data, and no judgement."""
