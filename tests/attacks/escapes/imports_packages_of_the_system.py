import glob, sys
done = []
for root in (sys.base_prefix, '/usr', '/usr/local'):
    for kind in ('site', 'dist'):
        for folder in glob.glob(root + '/lib*/*/' + kind + '-packages'):
            done += glob.glob(folder + '/*')
            sys.path.append(folder)
for name in ('pip', 'setuptools', 'numpy', 'pkg_resources', 'yaml', 'apt'):
    try:
        __import__(name)
        done.append(name)
    except ImportError:
        pass
print(done)
