def check(a, b, c):
    return 'yes'
