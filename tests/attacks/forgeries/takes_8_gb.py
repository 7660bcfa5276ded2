data = [bytearray(1 << 20) for _ in range(8192)]
