import mmap, os, time
held = 0
try:
    for _ in range(4):
        shared = mmap.mmap(-1, 256 << 20)
        for place in range(0, 256 << 20, 4096):
            shared[place] = 1
        if os.fork() == 0:
            time.sleep(99)
        shared.close()
        held += 256
except OSError:
    pass
print([held] * (held > 64))
