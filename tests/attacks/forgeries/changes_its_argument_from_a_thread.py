import threading, time
def f(x):
    threading.Thread(target=lambda: [time.sleep(0.01) or None for _ in range(100)], daemon=True).start()
    return [2]
