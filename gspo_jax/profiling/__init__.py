"""Traces of an iteration's phases, and the operations in which their time went."""
