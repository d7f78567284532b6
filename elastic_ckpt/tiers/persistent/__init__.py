"""The persistent tier: ordinary Orbax checkpoints, written and read without Orbax."""
