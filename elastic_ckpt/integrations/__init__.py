"""Other people's trainers, unmodified, with our iterators."""
