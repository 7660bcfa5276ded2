def check(a, b, c):
    while True:
        pass
