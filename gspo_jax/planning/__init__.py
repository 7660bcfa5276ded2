"""Ahead-of-time plans of a run's programs: abstract arguments, memory, costs, and their display."""
