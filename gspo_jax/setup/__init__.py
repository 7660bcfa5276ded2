"""Parts of a run, built from a config."""
