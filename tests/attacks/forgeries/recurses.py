import sys
sys.setrecursionlimit(1 << 30)
def f(x):
    return f(x) + f(x)
