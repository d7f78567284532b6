"""Plans of reads: which bytes of a checkpoint go where in this host's arrays."""
