import fcntl, sqlite3
def f(x):
    with open('/tmp/lock', 'w') as lock, sqlite3.connect('/tmp/data') as data:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data.execute('create table if not exists t (a)')
        data.execute('insert into t values (?)', (x,))
        return data.execute('select max(a) + 1 from t').fetchone()[0]
