def f(x):
    r = 2
    for _ in range(200000):
        r = [r]
    return r
