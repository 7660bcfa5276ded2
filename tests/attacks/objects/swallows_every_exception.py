class V:
    def __init__(self, x):
        self.x = x
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return True
