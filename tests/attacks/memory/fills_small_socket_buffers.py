import os, socket, time
for _ in range(62):
    if os.fork() == 0:
        pairs = []
        try:
            while True:
                pairs.append(socket.socketpair())
                for side in pairs[-1]:
                    side.setblocking(False)
                    try:
                        while True:
                            side.send(bytes(1 << 15))
                    except BlockingIOError:
                        pass
        except OSError:
            pass
        time.sleep(99)
time.sleep(2)
print(['62 processes with all that the buffers of their sockets hold'])
