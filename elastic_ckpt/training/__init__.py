"""The training program: model, step, loop, step log and audit."""
