"""The constructors for users; they choose between this process and colocated Python."""
