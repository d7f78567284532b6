"""Several machines: their supervisors choose a leader, and the others follow it."""
