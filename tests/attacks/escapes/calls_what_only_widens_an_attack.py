import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = {'statmount': 457, 'listmount': 458, 'open_tree_attr': 467, 'listns': 470, 'a later one': 999,
        'quotactl_fd': 443, 'landlock_create_ruleset': 444, 'memfd_secret': 447, 'mount_setattr': 442}
if platform.machine() == 'x86_64':
    numbers |= {'inotify_init1': 294, 'fanotify_init': 300, 'io_setup': 206, 'vmsplice': 278, 'memfd_create': 319,
        'shmget': 29, 'semget': 64, 'msgget': 68, 'mq_open': 240}
done = []
for name, number in numbers.items():
    libc.syscall(number, 0, 0, 0, 0, 0, 0)
    if ctypes.get_errno() != errno.ENOSYS:
        done.append(name)
print(done)
