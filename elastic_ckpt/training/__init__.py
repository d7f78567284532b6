"""The training program: model, step, loop, and the log that proves what it used."""
