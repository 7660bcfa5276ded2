import os
done = []
for act in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]),
            lambda: os.chroot('/tmp'), lambda: os.mknod('/tmp/d', 0o60600, 0x801)):
    try:
        act()
        done.append(1)
    except OSError:
        pass
print(done)
