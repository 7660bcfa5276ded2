def check(a, b, c):
    raise ValueError
