class BrokenTest(BaseException):
    pass
BrokenTest.__module__ = 'inside.mirror'
def f(x):
    raise BrokenTest('2')
