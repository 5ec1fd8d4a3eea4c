"""Recipes and runs: from one TOML file to a directory that says what happened."""
