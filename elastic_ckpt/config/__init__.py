"""MaxText-style configuration, strictly checked: YAML files, `key=value` overrides."""
