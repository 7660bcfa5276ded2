"""Ahead-of-time plans of a run's programs: arguments, memory, costs and display."""
