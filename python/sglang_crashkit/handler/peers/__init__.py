"""The other servers of a prefill and decode pair: watched by one connection to each, and an incident for each loss."""
