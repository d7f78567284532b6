"""The command line: one file a verb, and the one room that puts everything together."""
