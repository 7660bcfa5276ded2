import socket
try:
    print(socket.getaddrinfo('example.org', 80))
except OSError:
    print([])
