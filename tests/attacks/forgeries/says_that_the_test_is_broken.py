"""Answers a call itself, as its process does for what a test must not hand over."""

import json
import os
import struct

MESSAGE = json.dumps({"value": None, "state": [], "drop": [], "broken": "a test hands over what cannot cross"}).encode()


def f(x):
    for descriptor in range(3, 16):
        try:
            os.write(descriptor, struct.pack("<I", len(MESSAGE)) + MESSAGE)
        except OSError:
            pass
    return 2
