import socket
held, ends = 0, []
try:
    listener = socket.create_server(('127.0.0.1', 0))
    while True:
        ends.append(socket.create_connection(listener.getsockname()))
        ends.append(listener.accept()[0])
        for side in ends[-2:]:
            side.setblocking(False)
            try:
                while True:
                    held += side.send(bytes(1 << 16))
            except BlockingIOError:
                pass
except OSError:
    pass
print([held >> 20] * (held >> 20 > 64))
