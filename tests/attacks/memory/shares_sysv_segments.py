import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
libc.shmdt.argtypes = (ctypes.c_void_p,)
held = 0
for _ in range(4):
    segment = libc.shmget(0, 256 << 20, 0o1600)
    place = libc.shmat(segment, None, 0)
    if segment == -1 or place in (None, ctypes.c_void_p(-1).value):
        break
    ctypes.memset(place, 1, 256 << 20)
    libc.shmdt(place)
    held += 256
print([held] * (held > 64))
