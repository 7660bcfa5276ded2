class Meta(type):
    def __instancecheck__(cls, x):
        return True
    def __call__(cls, *a):
        return None
class V(metaclass=Meta):
    pass
