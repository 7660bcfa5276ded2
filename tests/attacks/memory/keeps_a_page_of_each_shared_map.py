import ctypes, mmap
libc, held = ctypes.CDLL(None), 0
libc.mmap.restype = ctypes.c_void_p
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
for _ in range(4):
    place = libc.mmap(None, ctypes.c_size_t(256 << 20), 3, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1, ctypes.c_long(0))
    if place == ctypes.c_void_p(-1).value:
        break
    ctypes.memset(place, 1, 256 << 20)
    libc.munmap(place + 4096, (256 << 20) - 4096)
    held += 256
print([held] * (held > 64))
