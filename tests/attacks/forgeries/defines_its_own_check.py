def check(candidate):
    pass
def test_f():
    pass
def f(x):
    return 0
