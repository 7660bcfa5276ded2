"""Says, while it is loaded, that what runs before it has failed, in every form in which that could be said."""

import json
import os
import struct
import sys

MESSAGE = json.dumps({"value": None, "state": [], "drop": [], "broken": "the prelude: ImportError"}).encode()
for descriptor in range(3, 16):
    try:
        os.write(descriptor, struct.pack("<I", len(MESSAGE)) + MESSAGE)
    except OSError:
        pass
error = next(kind for kind in TypeError.__subclasses__() if kind.__name__ == "Unsendable")
raise error("the prelude: ImportError")
