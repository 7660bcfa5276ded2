import sys, threading
t = threading.Thread(target=sys.exit)
t.start()
def f(x):
    sys.exit()
