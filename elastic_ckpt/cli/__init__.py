"""The command line: one file per verb, in the one room that combines all others."""
