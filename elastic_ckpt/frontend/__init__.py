"""What users construct: chooses between this process and colocated Python."""
