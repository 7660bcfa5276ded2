import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
tell, told = os.pipe()
for _ in range(6):
    if os.fork() == 0:
        for number in range(30000):
            place = (1 << 40) + (number << 30)
            libc.mmap(ctypes.c_void_p(place), ctypes.c_size_t(4096), 1, 0x100022, -1, ctypes.c_long(0))
            ctypes.c_char.from_address(place).value
        os.write(told, b'x')
        time.sleep(99)
for _ in range(6):
    os.read(tell, 1)
print(['6 processes with 30000 page tables of each kind'])
