import time
time.sleep(0.2)
def f(x):
    return x + 1
