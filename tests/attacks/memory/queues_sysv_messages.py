import ctypes
libc = ctypes.CDLL(None)
message, held = ctypes.create_string_buffer(b'\x01' + bytes(8192)), 0
for _ in range(1 << 15):
    queue = libc.msgget(0, 0o1600)
    if queue == -1:
        break
    while libc.msgsnd(queue, message, 8000, 0o4000) == 0:
        held += 8000
print([held >> 20] * (held >> 20 > 64))
