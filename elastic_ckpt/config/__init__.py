"""MaxText-style configuration: YAML files, `base_config:` and `key=value`, strict."""
