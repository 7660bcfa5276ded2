"""A run's folder: its place, its lease, its files."""
