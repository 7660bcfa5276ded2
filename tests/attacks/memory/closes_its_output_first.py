import os, time
for number in (0, 1, 2):
    os.close(number)
for _ in range(8):
    if os.fork() == 0:
        data = bytearray(b'1') * (400 << 20)
        time.sleep(99)
time.sleep(99)
