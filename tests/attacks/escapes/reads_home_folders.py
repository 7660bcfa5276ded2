import os, sys
found = []
for place in ('/root', '/home'):
    for folder, _, files in os.walk(place):
        found += [] if folder.startswith(sys.base_prefix) else files
print(found)
