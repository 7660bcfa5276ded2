import os
done = []
try:
    os.openpty()
    done.append('a terminal')
except OSError:
    pass
for place in ('/dev/ptmx', '/dev/pts/ptmx', '/dev/tty', '/dev/console'):
    try:
        os.open(place, os.O_RDWR | os.O_NOCTTY)
        done.append(place)
    except OSError:
        pass
print(done)
