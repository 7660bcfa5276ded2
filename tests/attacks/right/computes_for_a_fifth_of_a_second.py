import time
def f(x):
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    return x + 1
