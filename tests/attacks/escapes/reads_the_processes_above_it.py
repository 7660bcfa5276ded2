import os
print(sorted({*os.listdir('/proc'), *os.listdir('/proc/self'), *os.listdir('/proc/self/fd')} - {'self', 'fd', '0'}), os.getppid())
