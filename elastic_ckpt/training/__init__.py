"""The reference trainer: its configuration, its runs, and the records they leave."""
