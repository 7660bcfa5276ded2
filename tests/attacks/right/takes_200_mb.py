def f(x):
    return len(bytearray(b'1') * (200 << 20)) // (200 << 20) + x
