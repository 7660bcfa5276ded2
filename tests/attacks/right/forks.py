import os
def f(x):
    for _ in range(8):
        if os.fork() == 0:
            os.setsid()
            os._exit(x)
    return sum(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(8)) // 8 + 1
