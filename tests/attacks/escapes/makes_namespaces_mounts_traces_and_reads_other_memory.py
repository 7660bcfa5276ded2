import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
done = []
for name, *args in (('unshare', 0x10000000), ('mount', b'x', b'/tmp', b'tmpfs', 0, None), ('umount2', b'/proc', 2),
        ('ptrace', 16, os.getppid(), 0, 0), ('setns', 0, 0), ('personality', 0x0040000), ('pivot_root', b'/', b'/'),
        ('process_vm_readv', 1, 0, 0, 0, 0, 0), ('sethostname', b'x', 1), ('swapon', b'/tmp/x', 0)):
    f = getattr(libc, name, None)
    if f is not None and f(*args) not in (-1,):
        done.append(name)
if libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) == 0:
    done.append('clone')
print(done)
