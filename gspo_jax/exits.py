"""Exit codes of the commands, which tell a launcher whether to start a run again.

0: finished (`finished.json`), or stopped and saved (`stopped.json`). 1: an unexpected error; start again.
"""

import os

MISTAKE = 2
"""The input is wrong; starting again would end the same way."""
LOST = 3
"""Another process of the run is lost; start all of them again."""
LATE = 4
"""A deadline has passed: the process hung, or could not be saved in the time it had to stop. Start again."""
DIVERGED = 5
"""The numbers went bad: non-finite gradients or parameters. Starting again would end the same way."""
TAKEN = 6
"""Another run has taken over the run folder; starting again would only find it in use."""
FINAL = (MISTAKE, DIVERGED, TAKEN)
"""Codes after which starting again would end the same way."""
SIGNALLED = 128
"""Added to the number of the signal that ended a command before it had anything to save, as shells do."""

leave = os._exit
"""End this process at once, whatever its threads are doing; `references.refuse_exits` takes the name in `os` away."""
