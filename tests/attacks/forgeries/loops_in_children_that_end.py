import os, signal, time
try:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
except OSError:
    pass
def loop(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
for _ in range(4):
    if os.fork() == 0:
        while True:
            if os.fork() == 0:
                loop(0.005)
                os._exit(0)
            try:
                os.wait()
            except OSError:
                pass
def f(x):
    time.sleep(99)
