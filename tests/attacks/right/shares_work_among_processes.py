import multiprocessing
def f(x):
    processes = multiprocessing.get_context('fork')
    with processes.Pool(2) as pool, processes.Manager() as manager:
        found = manager.dict(x=sum(pool.map(abs, [x, 1])))
        total = processes.Value('i', found['x'])
        return total.value
