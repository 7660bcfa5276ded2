import os
for _ in range(60):
    if os.fork() == 0:
        try:
            os.setsid()
        finally:
            while True:
                pass
def f(x):
    while True:
        pass
