import mmap, os
held, files = 0, []
try:
    while held < 1024:
        files.append(os.memfd_create('x'))
        os.ftruncate(files[-1], 32 << 20)
        with mmap.mmap(files[-1], 32 << 20) as shared:
            for place in range(0, 32 << 20, 4096):
                shared[place] = 1
        held += 32
except OSError:
    pass
print([held] * (held > 64))
