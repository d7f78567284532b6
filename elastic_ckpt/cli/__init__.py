"""The command line, one file per verb. Only this package combines all others."""
