i = 0
while True:
    open(f'/tmp/{i}', 'w').close()
    i += 1
