"""The command line: one file a verb, and the only room that puts everything together."""
