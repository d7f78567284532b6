"""The algebra of layouts: rules, matched with a checkpoint, become moves."""
