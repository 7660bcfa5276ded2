done = []
for place in ('/dev/mem', '/dev/kmsg', '/dev/sda', '/dev/vda', '/dev/kvm', '/dev/fuse'):
    try:
        open(place, 'rb')
        done.append(place)
    except OSError:
        pass
print(done)
