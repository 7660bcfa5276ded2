"""Calls of user functions and servers, many at a time, each with a deadline and retries (calls.py).

A call that fails is no result and not the end of the run (failures.py).
"""
