import os
print([k for k in os.environ if k not in ('LANG', 'PATH', 'HOME', 'PWD')])
