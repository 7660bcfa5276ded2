import time
try:
    time.clock_settime(time.CLOCK_REALTIME, 0)
    print('set')
except OSError:
    print([])
