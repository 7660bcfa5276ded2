import signal
for s in range(1, 65):
    try:
        signal.signal(s, lambda *a: None)
    except (OSError, ValueError):
        pass
def f(x):
    while True:
        pass
