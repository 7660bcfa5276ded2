class Done(SystemExit):
    code = 0
def f(x):
    raise Done
