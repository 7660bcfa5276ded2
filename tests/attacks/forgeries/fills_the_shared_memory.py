with open('/dev/shm/big', 'wb') as f:
    for _ in range(10240):
        f.write(bytes(1 << 20))
