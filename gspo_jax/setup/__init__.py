"""Parts of a run, built from a config. Below this package, functions take plain keyword arguments."""
