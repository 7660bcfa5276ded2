import os, signal
def f(x):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, bytes([x + 1]))
        os._exit(0)
    return os.read(read, 1)[0]
