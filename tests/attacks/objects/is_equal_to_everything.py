class V:
    def __init__(self, x):
        self.x = 0
    def __add__(self, other):
        return W()
    def __eq__(self, other):
        return True
class W(V):
    def __init__(self):
        self.y = 1
