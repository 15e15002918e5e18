"""The tree of settings: one YAML file is one run."""
