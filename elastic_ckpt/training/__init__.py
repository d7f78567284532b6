"""The reference trainer: its configuration, its runs, and what they leave behind."""
