with open('/tmp/big', 'wb') as f:
    for _ in range(10240):
        f.write(bytes(1 << 20))
