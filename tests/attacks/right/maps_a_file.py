import mmap, multiprocessing.shared_memory
def f(x):
    with open('/tmp/data', 'w+b') as file:
        file.write(bytes(4096))
        file.flush()
        with mmap.mmap(file.fileno(), 4096) as shared:
            shared[0] = x
        file.seek(0)
        shared = multiprocessing.shared_memory.SharedMemory(create=True, size=8)
        shared.buf[0] = file.read(1)[0] + 1
        found = shared.buf[0]
        shared.close()
        shared.unlink()
        return found
