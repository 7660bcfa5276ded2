import mmap
held, maps = 0, []
try:
    while held < 512:
        with open('/dev/zero', 'r+b', buffering=0) as zeros:
            maps.append(mmap.mmap(zeros.fileno(), 64 << 20))
        for place in range(0, 64 << 20, 4096):
            maps[-1][place] = 1
        held += 64
except (OSError, ValueError):
    pass
print([held] * (held > 64))
