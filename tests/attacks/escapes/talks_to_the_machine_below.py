import socket
done = []
for family in ('AF_VSOCK', 'AF_INET', 'AF_INET6', 'AF_NETLINK', 'AF_PACKET', 'AF_ALG', 'AF_CAN', 'AF_TIPC', 'AF_QIPCRTR'):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
        try:
            socket.socket(getattr(socket, family), kind)
            done.append(family)
        except OSError:
            pass
print(done)
