import os, socket, time
tell, told = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        held, pairs = 0, []
        try:
            while True:
                pairs.append(socket.socketpair())
                for side in pairs[-1]:
                    side.setblocking(False)
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
                    try:
                        while True:
                            held += side.send(bytes(1 << 16))
                    except BlockingIOError:
                        pass
        except OSError:
            pass
        os.write(told, b'%9d' % (held >> 20))
        time.sleep(99)
held = 0
for _ in range(4):
    held += int(os.read(tell, 9))
print([held] * (held > 64))
