import subprocess
def f(x):
    said = subprocess.run(f'expr {x} + 1; true', shell=True, capture_output=True, start_new_session=True)
    return int(said.stdout)
