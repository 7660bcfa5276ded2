import os, sys
done = []
for root in (sys.base_prefix, '/usr', '/usr/local'):
    for folder, _, names in os.walk(root):
        if os.path.basename(folder) in ('site-packages', 'dist-packages') and (names or os.listdir(folder)):
            done.append(folder)
print(done)
