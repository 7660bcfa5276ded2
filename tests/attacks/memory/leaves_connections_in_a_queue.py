import ctypes, os, socket, time
libc = ctypes.CDLL(None)
for number in range(4):
    if os.fork() == 0:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f'/tmp/{number}')
        listener.listen(4096)
        for _ in range(2000):
            with socket.socket(socket.AF_UNIX) as client:
                client.setblocking(False)
                client.connect(f'/tmp/{number}')
                try:
                    while True:
                        client.send(bytes(1 << 15))
                except BlockingIOError:
                    pass
        time.sleep(99)
time.sleep(8)
print(['8000 connections with all that their buffers hold'])
