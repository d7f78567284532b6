"""Files that other programs write, read without those programs and without torch."""
