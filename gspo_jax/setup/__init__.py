"""From a config to the parts of a run. The only code below the entry points that reads a ConfigDict."""
