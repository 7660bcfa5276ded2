"""A program's world: what a function's tests see of it across the border, and what a whole program finds around it.

Each row is judged in the real sandbox: 1, 0, or None where the test can't be judged.
"""

import pytest

from gspo_jax.errors import UserError
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.sandbox import Sandbox

TIMEOUT_S = 10.0
FUNCTIONS = [
    (
        "sort in place",
        """def f(x):
    x.sort()""",
        [
            """a=[3,1,2]
f(a)
assert a==[1,2,3]"""
        ],
        1,
    ),
    (
        "must not mutate",
        """def f(x):
    x.sort()
    return x""",
        [
            """a=[3,1,2]
f(a)
assert a==[3,1,2]"""
        ],
        0,
    ),
    (
        "dict update",
        """def f(d):
    d['b']=2
    d.pop('a')""",
        [
            """d={'a':1}
f(d)
assert d=={'b':2}"""
        ],
        1,
    ),
    (
        "hash without equality",
        """class V:
    def __hash__(self):
        return 7""",
        ["assert hash(V()) == 7 and V() != V()"],
        1,
    ),
    (
        "nested alias",
        """def f(m):
    m[0].append(1)""",
        [
            """r=[0]
m=[r,r]
f(m)
assert r==[0,1] and m==[[0,1],[0,1]] and m[0] is m[1]"""
        ],
        1,
    ),
    (
        "same twice",
        """def f(a,b):
    a.append(1)
    return len(b), a is b""",
        [
            """x=[]
assert f(x,x)==(1,True)"""
        ],
        1,
    ),
    (
        "returned arg is arg",
        """def f(a):
    a.append(1)
    return a""",
        [
            """x=[]
assert f(x) is x"""
        ],
        1,
    ),
    (
        "kept arg",
        """class S:
    def __init__(self,a):
        self.a=a
    def go(self):
        self.a.append(9)""",
        [
            """x=[1]
s=S(x)
s.go()
assert x==[1,9]
x.append(3)
assert s.a==[1,9,3] and s.a is x"""
        ],
        1,
    ),
    (
        "test mutates returned",
        """class S:
    def __init__(self):
        self.items=[]
    def pop(self):
        return self.items.pop()""",
        [
            """s=S()
s.items.append(3)
assert s.pop()==3 and s.items==[]"""
        ],
        1,
    ),
    (
        "cycle",
        """def f(a):
    a.append(a)
    return a""",
        [
            """x=[1]
y=f(x)
assert y[1] is y and y is x"""
        ],
        1,
    ),
    (
        "mutable default",
        """def f(x, acc=[]):
    acc.append(x)
    return acc""",
        [
            """a=f(1)
b=f(2)
assert a is b and a==[1,2]"""
        ],
        1,
    ),
    (
        "set, deque, bytearray",
        """def f(s,d,b):
    s.add(1); d.rotate(1); b.append(65)""",
        [
            """from collections import deque
s=set();d=deque([1,2]);b=bytearray()
f(s,d,b)
assert s=={1} and d==deque([2,1]) and b==b'A'"""
        ],
        1,
    ),
    (
        "counter",
        """from collections import Counter, OrderedDict, defaultdict
def f(s):
    return Counter(s)
def g():
    d=defaultdict(list)
    d['a'].append(1)
    return d
def h():
    return OrderedDict([(1,2),(3,4)])""",
        [
            """from collections import *
assert isinstance(f('aab'),Counter)
assert f('aab').most_common(1)==[('a',2)]
assert f('aab')=={'a':2,'b':1}
d=g()
assert d=={'a':[1]} and d['z']==[]
assert h()!=OrderedDict([(3,4),(1,2)])"""
        ],
        1,
    ),
    (
        "isinstance",
        """class A: pass
class B(A): pass
def f():
    return B()""",
        [
            """assert isinstance(f(),A)
assert isinstance(f(),B)
assert not isinstance(f(),int)
assert issubclass(B,A)
assert type(f()) is B
assert type(f()).__name__=='B'
assert isinstance(f(),(int,A))"""
        ],
        1,
    ),
    (
        "dataclass",
        """from dataclasses import dataclass
@dataclass
class P:
    x: int
    y: int = 0
def f(x):
    return P(x)""",
        ["assert f(1)==P(1) and f(1)!=P(2) and f(1).x==1 and [f(1)]==[P(1,0)] and repr(f(1))=='P(x=1, y=0)'"],
        1,
    ),
    (
        "dataclass string annotations",
        """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class P:
    x: int""",
        ["assert P(1)==P(1)"],
        1,
    ),
    (
        "enum",
        """from enum import Enum, IntEnum, auto
class C(Enum):
    R=1
    G=2
class I(IntEnum):
    A=1
class S(str,Enum):
    U='up'
def f():
    return C.R""",
        [
            """assert f() is C.R
assert f()==C.R
assert f()!=C.G
assert C(1) is C.R
assert C['G'].value==2
assert f().name=='R'
assert [c.name for c in C]==['R','G']
assert len(C)==2
assert f() in (C.R,)
assert {C.R:1}[f()]==1
assert I.A==1
assert I.A+1==2
assert isinstance(I.A,I)
assert S.U=='up'
assert isinstance(f(),C)"""
        ],
        1,
    ),
    (
        "namedtuple",
        """from collections import namedtuple
from typing import NamedTuple
P=namedtuple('P','x y')
class Q(NamedTuple):
    a:int
    b:int=2
    def s(self):
        return self.a+self.b
def f():
    return P(1,2)""",
        [
            """assert f()==P(1,2)==(1,2)
assert f().x==1
assert isinstance(f(),tuple)
assert isinstance(f(),P)
assert f()._asdict()=={'x':1,'y':2}
assert Q(1).s()==3
assert Q(1)==(1,2)
assert f()._replace(x=5).x==5
a,b=f()
assert hash(f())==hash((1,2))"""
        ],
        1,
    ),
    (
        "vector",
        """class V:
    def __init__(self,x,y):
        self.x=x; self.y=y
    def __add__(self,o):
        return V(self.x+o.x,self.y+o.y)
    def __mul__(self,k):
        return V(self.x*k,self.y*k)
    __rmul__=__mul__
    def __eq__(self,o):
        return isinstance(o,V) and (self.x,self.y)==(o.x,o.y)
    def __hash__(self):
        return hash((self.x,self.y))
    def __repr__(self):
        return f'V({self.x}, {self.y})'
    def __abs__(self):
        return (self.x**2+self.y**2)**.5
    def __len__(self):
        return 2
    def __getitem__(self,i):
        return (self.x,self.y)[i]
    def __neg__(self):
        return V(-self.x,-self.y)
    def __lt__(self,o):
        return abs(self)<abs(o)""",
        [
            """assert V(1,2)+V(3,4)==V(4,6)
assert V(1,2)!=V(1,3)
assert 2*V(1,2)==V(2,4)==V(1,2)*2
assert abs(V(3,4))==5
assert str(V(1,2))=='V(1, 2)'
assert len(V(1,2))==2
assert list(V(1,2))==[1,2]
assert -V(1,2)==V(-1,-2)
assert V(0,1)<V(3,4)
assert sorted([V(3,4),V(0,1)])[0]==V(0,1)
assert len({V(1,2),V(1,2)})==1
assert V(1,2) in [V(1,2)]
assert f'{V(1,2)}'=='V(1, 2)'"""
        ],
        1,
    ),
    (
        "wrong vector",
        """class V:
    def __init__(self,x,y):
        self.x=x; self.y=y
    def __add__(self,o):
        return V(self.x,self.y)
    def __eq__(self,o):
        return (self.x,self.y)==(o.x,o.y)""",
        ["assert V(1,2)+V(3,4)==V(4,6)"],
        0,
    ),
    (
        "singleton",
        """class S:
    _i=None
    def __new__(cls):
        if cls._i is None:
            cls._i=super().__new__(cls)
        return cls._i
_x=object()
def get():
    return _x
def f():
    return None""",
        ["assert S() is S() and get() is get() and f() is None"],
        1,
    ),
    (
        "not singleton",
        """class S: pass
def get():
    return S()""",
        ["assert get() is get()"],
        0,
    ),
    (
        "json error",
        """import json
def f(s):
    return json.loads(s)""",
        [
            """try:
    f('{')
    assert False
except ValueError as e:
    assert 'Expecting' in str(e)""",
            """import json
try:
    f('{')
except json.JSONDecodeError as e:
    assert e.pos==1
else:
    assert False""",
        ],
        1,
    ),
    (
        "own error",
        """class InsufficientFunds(ValueError):
    def __init__(self, need):
        super().__init__(f'need {need}')
        self.need=need
class E2(Exception): pass
def f():
    raise InsufficientFunds(3)
def g():
    raise E2('x')
def h():
    raise ValueError('negative')
def k():
    return {}['a']""",
        [
            """try:
    f()
    assert False
except InsufficientFunds as e:
    assert e.need==3 and str(e)=='need 3' and e.args==('need 3',)""",
            """try:
    f()
    assert False
except ValueError:
    pass""",
            """try:
    g()
    assert False
except E2 as e:
    assert str(e)=='x'""",
            """try:
    h()
except ValueError as e:
    assert str(e)=='negative'
else:
    assert 0""",
            """try:
    k()
except LookupError as e:
    assert e.args==('a',)
else:
    assert 0""",
        ],
        1,
    ),
    (
        "coroutine",
        """import asyncio
async def f(x):
    await asyncio.sleep(0.01)
    return x+1
async def bad():
    raise ValueError('no')
async def ag(n):
    for i in range(n):
        yield i""",
        [
            """import asyncio
assert asyncio.run(f(1))==2""",
            """import asyncio
async def m():
    return await asyncio.gather(f(1),f(2))
assert asyncio.run(m())==[2,3]""",
            """import asyncio
try:
    asyncio.run(bad())
    assert 0
except ValueError as e:
    assert str(e)=='no'""",
            """import asyncio
async def m():
    return [i async for i in ag(3)]
assert asyncio.run(m())==[0,1,2]""",
            """import asyncio,inspect
c=f(1)
assert inspect.iscoroutine(c)
assert asyncio.get_event_loop_policy() and asyncio.new_event_loop().run_until_complete(c)==2""",
        ],
        1,
    ),
    (
        "wait_for",
        """import asyncio
async def slow():
    await asyncio.sleep(5)""",
        [
            """import asyncio
async def m():
    try:
        await asyncio.wait_for(slow(),0.05)
    except asyncio.TimeoutError:
        return 1
assert asyncio.run(m())==1"""
        ],
        1,
    ),
    (
        "infinite generator",
        """def fib():
    a,b=0,1
    while True:
        yield a
        a,b=b,a+b
import itertools
def c():
    return itertools.count(5)""",
        [
            """from itertools import islice
assert list(islice(fib(),5))==[0,1,1,2,3]""",
            """g=fib()
assert next(g)==0 and next(g)==1""",
            """import itertools
assert list(itertools.islice(c(),2))==[5,6]""",
            """import types,inspect
assert isinstance(fib(),types.GeneratorType) and inspect.isgenerator(fib())""",
        ],
        1,
    ),
    (
        "generator send",
        """def acc():
    t=0
    while True:
        x=yield t
        t+=x""",
        [
            """g=acc()
next(g)
assert g.send(3)==3 and g.send(4)==7"""
        ],
        1,
    ),
    (
        "generator of own",
        """def f(xs):
    for x in xs:
        yield x*2""",
        ["assert list(f([1,2]))==[2,4] and sum(f(range(3)))==6 and list(f(x for x in 'ab'))==['aa','bb']"],
        1,
    ),
    (
        "prints",
        """def f():
    print('hi', end='')
    print('there')
import sys
def e():
    print('x', file=sys.stderr)""",
        [
            r"""import io,contextlib
b=io.StringIO()
with contextlib.redirect_stdout(b):
    f()
assert b.getvalue()=='hithere\n'""",
            r"""import io,sys
o=sys.stdout
sys.stdout=io.StringIO()
f()
v=sys.stdout.getvalue()
sys.stdout=o
assert v=='hithere\n'""",
            r"""import io
from contextlib import redirect_stderr
b=io.StringIO()
with redirect_stderr(b):
    e()
assert b.getvalue()=='x\n'""",
            r"""import io
from unittest.mock import patch
with patch('sys.stdout', new_callable=io.StringIO) as b:
    f()
    assert b.getvalue()=='hithere\n'""",
        ],
        1,
    ),
    (
        "LRU",
        """from collections import OrderedDict
class LRUCache(OrderedDict):
    def __init__(self,c):
        super().__init__()
        self.c=c
    def get(self,k):
        if k not in self: return -1
        self.move_to_end(k)
        return self[k]
    def put(self,k,v):
        self[k]=v
        self.move_to_end(k)
        if len(self)>self.c: self.popitem(last=False)""",
        [
            """c=LRUCache(2)
c.put(1,1);c.put(2,2)
assert c.get(1)==1
c.put(3,3)
assert c.get(2)==-1 and len(c)==2 and list(c)==[1,3]"""
        ],
        1,
    ),
    (
        "list subclass",
        """class Stack(list):
    def push(self,x):
        self.append(x)
    def peek(self):
        return self[-1]""",
        [
            """s=Stack()
s.push(1)
s.append(2)
assert s.peek()==2 and s==[1,2] and isinstance(s,list) and s.pop()==2 and s.peek()==1"""
        ],
        1,
    ),
    (
        "context manager, property, static",
        """class A:
    n=0
    def __enter__(self):
        self.o=True
        return self
    def __exit__(self,*a):
        self.o=False
        return a[0] is not None
    @property
    def p(self): return 5
    @staticmethod
    def s(): return 6
    @classmethod
    def c(cls): return cls()
    def __call__(self,x): return x
    def __contains__(self,x): return x==1
    def __iter__(self): return iter([1])""",
        [
            """with A() as a:
    assert a.o
assert not a.o
assert a.p==5
assert A.s()==6
assert isinstance(A.c(),A)
assert a(3)==3
assert callable(a)
assert A.n==0
assert 1 in a
assert 2 not in a
assert a.__dict__=={'o':False}
a.z=4
assert a.z==4
assert vars(a)['z']==4
assert hasattr(a,'z')
assert not hasattr(a,'y')
assert a.__class__.__name__=='A'"""
        ],
        1,
    ),
    (
        "solution",
        """class Solution:
    def two(self, nums, t):
        return [0,1]""",
        [
            """assert Solution().two([2,7],9)==[0,1]
s=Solution()
assert s.two(nums=[2,7],t=9)==[0,1]"""
        ],
        1,
    ),
    (
        "unittest",
        """def f(x):
    if x<0: raise ValueError('neg')
    return x""",
        [
            """import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertEqual(f(1),1)
    def test_r(self):
        with self.assertRaises(ValueError):
            f(-1)
        self.assertRaises(ValueError,f,-1)
        with self.assertRaisesRegex(ValueError,'neg'):
            f(-1)
if __name__=='__main__':
    unittest.main()"""
        ],
        1,
    ),
    (
        "unittest fails",
        """def f(x):
    return x+1""",
        [
            """import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertEqual(f(1),1)"""
        ],
        0,
    ),
    (
        "unittest main",
        """def f(x):
    return x""",
        [
            """import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertEqual(f(1),1)
unittest.main()"""
        ],
        1,
    ),
    (
        "numpy",
        """def f(x):
    return x""",
        [
            """import numpy as np
assert f(np.array([1]))==1"""
        ],
        None,
    ),
    (
        "pytest",
        """def f(x):
    return x""",
        [
            """import pytest
assert f(1)==1"""
        ],
        None,
    ),
    (
        "program without numpy",
        """import numpy
def f(x):
    return x""",
        ["assert f(1)==1"],
        0,
    ),
    (
        "lambda handed",
        """def f(g):
    return g()""",
        ["assert f(lambda: 1)==1"],
        None,
    ),
    (
        "builtin function handed",
        """def f(g,x):
    return g(x)""",
        [
            """import math
assert f(len,'abc')==3 and f(math.sqrt,4)==2 and f(str,1)=='1'"""
        ],
        1,
    ),
    (
        "patched input",
        """def f():
    return input()""",
        [
            """from unittest.mock import patch
with patch('builtins.input', return_value='5'):
    assert f()=='5'"""
        ],
        None,
    ),
    (
        "stdin replaced",
        """def f():
    return input()""",
        [
            """import sys,io
sys.stdin=io.StringIO('5')
assert f()=='5'"""
        ],
        None,
    ),
    (
        "file",
        """def f(p):
    return open(p).read()""",
        [
            """with open('/tmp/x','w') as h:
    h.write('a')
assert f('/tmp/x')=='a'"""
        ],
        None,
    ),
    (
        "seed",
        """import random
def f():
    return random.random()""",
        [
            """import random
random.seed(1)
a=f()
random.seed(1)
assert a==f()==random.random() or a==0.13436424411240122"""
        ],
        1,
    ),
    (
        "money",
        """class M:
    def __init__(s,x): s.x=x
    def __eq__(s,o):
        return s.x==(o.x if isinstance(o,M) else o)""",
        ["assert M(5)==5"],
        None,
    ),
    (
        "linked list of tests",
        """def rev(h):
    p=None
    while h:
        h.next,p,h=p,h,h.next
    return p""",
        [
            """class N:
    def __init__(self,v,next=None):
        self.v=v; self.next=next
h=N(1,N(2,N(3)))
r=rev(h)
assert isinstance(r,N)
assert (r.v,r.next.v,r.next.next.v,r.next.next.next)==(3,2,1,None)
assert h.next is None"""
        ],
        1,
    ),
    (
        "object attrs",
        """def f(o):
    o.x=5
    o.l.append(1)""",
        [
            """class O: pass
o=O()
o.x=1
o.l=[]
f(o)
assert o.x==5 and o.l==[1]"""
        ],
        1,
    ),
    (
        "global",
        """n=0
def f():
    global n
    n+=1""",
        [
            """assert n==0
f()
assert n==1"""
        ],
        1,
    ),
    (
        "sysexit",
        """import sys
def f():
    sys.exit(2)""",
        [
            """try:
    f()
except SystemExit as e:
    assert e.code==2
else:
    assert 0"""
        ],
        1,
    ),
    (
        "exit builtin",
        """def f(x):
    if x: exit()
    return 1""",
        ["assert f(0)==1"],
        1,
    ),
    (
        "functools partial & closures",
        """from functools import partial
def add(a,b): return a+b
inc=partial(add,1)
def mk(n):
    return lambda x: x+n""",
        ["assert inc(2)==3 and mk(2)(3)==5 and add.__name__=='add' and mk(1) is not mk(1)"],
        1,
    ),
    (
        "trees",
        """class T:
    def __init__(self,v,l=None,r=None): self.v=v;self.l=l;self.r=r
def depth(t):
    return 0 if t is None else 1+max(depth(t.l),depth(t.r))
def mirror(t):
    if t: t.l,t.r=mirror(t.r),mirror(t.l)
    return t""",
        [
            """t=T(1,T(2),None)
assert depth(t)==2
m=mirror(t)
assert m is t and t.l is None and t.r.v==2
t.l=T(9)
assert t.l.v==9 and depth(t)==2"""
        ],
        1,
    ),
    (
        "zip map",
        """def f(a): return map(str,a)
def g(a): return zip(a,a)
def k(d): return d.keys()""",
        [
            """assert list(f([1]))==['1']
assert list(g([1]))==[(1,1)]
assert k({1:2})=={1}
assert sorted(k({2:1,1:1}))==[1,2]
assert set(f([1]))=={'1'}"""
        ],
        1,
    ),
    (
        "program caches",
        """from functools import lru_cache
@lru_cache
def f(n): return n if n<2 else f(n-1)+f(n-2)""",
        ["assert f(30)==832040 and f.cache_info().hits>0"],
        1,
    ),
    (
        "abc",
        """from abc import ABC, abstractmethod
class S(ABC):
    @abstractmethod
    def area(self): ...
class C(S):
    def area(self): return 3""",
        [
            """assert C().area()==3 and isinstance(C(),S)
try:
    S()
except TypeError:
    pass
else:
    assert 0"""
        ],
        1,
    ),
    (
        "derive",
        """class B:
    def go(self): return self.x()""",
        [
            """class D(B):
    def x(self): return 1
assert D().go()==1"""
        ],
        None,
    ),
    (
        "deepcopy",
        """class A:
    def __init__(self): self.l=[1]""",
        [
            """import copy
a=A()
b=copy.deepcopy(a)
b.l.append(2)
assert a.l==[1] and b.l==[1,2]"""
        ],
        1,
    ),
    (
        "set of program",
        """class K:
    def __init__(s,x): s.x=x
    def __eq__(s,o): return s.x==o.x
    def __hash__(s): return hash(s.x)
def f():
    return {K(1),K(2)}, {K(1):3}""",
        [
            """s,d=f()
assert len(s)==2 and K(1) in s and d[K(1)]==3"""
        ],
        1,
    ),
    (
        "is nan",
        "def f(): return float('nan')",
        [
            """import math
assert math.isnan(f())"""
        ],
        1,
    ),
    (
        "decimal",
        """from decimal import Decimal
from datetime import timedelta, time
def f(): return Decimal('1.10'), timedelta(1), time(3)""",
        [
            """from decimal import Decimal
from datetime import *
assert f()==(Decimal('1.1'),timedelta(days=1),time(3))"""
        ],
        1,
    ),
]
"""What is tried, a program, its tests, and the score that one process would give; None where that cannot be known."""

MANY = [
    (
        "a function called like a builtin",
        """def sum(a, b):
    return a + b
def pow(x, n):
    return x * n
class range:
    def __init__(s, n): s.n = n""",
        {
            "assert sum(1, 2) == 3": 1,
            "assert sum(1, 2) == 4": 0,
            "assert pow(2, 10) == 1024": 0,
            "assert range(3).n == 3": 1,
            "assert len([1, sum(1, 1)]) == 2": 1,
            "assert sum(pow(2, 3), 1) == 7": None,
        },
    ),
    (
        "a helper called like a builtin",
        """def max(*a):
    return 7
def f(x):
    return x""",
        {
            "assert max(f(1), f(2)) == 2": 1,
            "assert max(f(1), f(2)) == 7": 0,
        },
    ),
    (
        "a function called like a module",
        """class queue:
    def __init__(s): s.x = []
    def size(s): return len(s.x)
def bisect(a, x):
    return a.index(x)
import math
def root(x): return math.sqrt(x)""",
        {
            "assert queue().size() == 0 and bisect([1, 2], 2) == 1": 1,
            "assert bisect([1, 2], 2) == 0": 0,
            """from bisect import bisect
assert bisect([1, 2], 2) == 2 and queue().size() == 0""": 1,
            "assert math.isclose(root(4), 2)": 1,
        },
    ),
    (
        "cases for pytest",
        """def add(a, b):
    return a + b""",
        {
            """def test_add():
    assert add(1, 2) == 3""": 1,
            """def test_add():
    assert add(1, 2) == 4""": 0,
            """class TestAdd:
    def setup_method(self):
        self.x = 1
    def test_it(self):
        assert add(self.x, 2) == 3""": 1,
            """class TestAdd:
    def test_it(self):
        assert add(1, 2) == 4""": 0,
            """def test_add(tmp_path):
    assert add(1, 2) == 3""": None,
            """def test(f):
    assert f(1, 2) == 3
test(add)""": 1,
            """if __name__ == '__main__':
    test_add()
def test_add():
    assert add(1, 2) == 4""": 0,
            """def verify():
    assert add(1, 2) == 4""": None,
            "# assert add(1, 2) == 4": None,
            """import unittest
class T(unittest.TestCase):
    def test(self):
        import numpy
        self.assertEqual(add(1, 2), 3)""": None,
        },
    ),
    (
        "a global that a test replaces",
        """LIMIT = 3
cnt = 0
n = 7
def over(x):
    return x > LIMIT
def inc():
    global cnt
    cnt += 1
def helper(x):
    return x
def f(x):
    n = helper(x)
    return n + 1""",
        {
            """LIMIT = 10
assert over(5)""": None,
            """cnt = 10
inc()
assert cnt == 11""": None,
            """helper = lambda x: 10
assert f(1) == 11""": None,
            """def helper(x): return 10
assert f(1) == 2""": None,
            """from unittest.mock import patch
with patch(__name__ + '.helper', return_value=10):
    assert f(1) == 11""": None,
            """n = f(1)
assert n == 2""": 1,
            """n = f(1)
assert n == 3""": 0,
            """from math import cos as helper
assert f(1) == 2""": None,
        },
    ),
    (
        "a method or a generator that a test replaces",
        """import random
class A:
    def get(self): return 1
    def use(self): return self.get() + 1
def f(): return random.random()""",
        {
            """from unittest.mock import patch
with patch.object(A, 'get', return_value=5):
    assert A().use() == 6""": None,
            """import random
s = random.getstate()
a = f()
random.setstate(s)
assert f() == a""": None,
        },
    ),
    (
        "the same imports",
        """from collections import Counter
from math import pi
import math
def f(x): return Counter(x), pi, math.tau""",
        {
            """from collections import Counter
from math import pi
import math
assert f('a') == (Counter('a'), pi, math.tau)""": 1,
        },
    ),
    (
        "an iterator of a test",
        """from itertools import islice
def noop(it): return 0
def take(it, n): return list(islice(it, n))
class Keep:
    def __init__(self, it): self.it = it
    def get(self): return next(self.it)""",
        {
            """it = iter([1, 2, 3])
noop(it)
assert next(it, None) is None""": 0,
            """it = iter([1, 2, 3])
noop(it)
assert next(it) == 1""": 1,
            """it = iter((1, 2, 3))
assert take(it, 2) == [1, 2] and next(it) == 3""": 1,
            """it = (x for x in range(5))
assert take(it, 2) == [0, 1] and next(it) == 2""": 1,
            """it = map(str, [1, 2])
noop(it)
assert list(it) == ['1', '2']""": 1,
            """import itertools
it = itertools.count()
assert take(it, 2) == [0, 1] and next(it) == 2""": 1,
            """it = iter('abcd')
k = Keep(it)
assert k.get() == 'a' and next(it) == 'b' and k.get() == 'c' and k.it is it""": 1,
            """def g():
    yield len(take(iter('ab'), 5))
    yield 2
assert take(g(), 5) == [2, 2]""": 1,
            """def g():
    yield 1
    raise ValueError
assert take(g(), 1) == [1]""": 1,
        },
    ),
    (
        "a file of a test",
        "def f(s): return s.readline()",
        {
            """import io
assert f(io.StringIO('a b')) == 'a b'""": None,
        },
    ),
    (
        "threads of a test",
        """import threading, queue
class C:
    def __init__(s): s.v = 0
    def inc(s): s.v += 1
def sq(x): return x * x
q = queue.Queue()
def get(): return q.get()
def put(x): q.put(x)""",
        {
            """from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as e:
    assert list(e.map(sq, range(20))) == [x * x for x in range(20)]""": 1,
            """import threading
c = C()
def go():
    for _ in range(20): c.inc()
ts = [threading.Thread(target=go) for _ in range(6)]
[t.start() for t in ts]
[t.join() for t in ts]
assert c.v == 120""": 1,
            """from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as e:
    assert list(e.map(sq, [2])) == [5]""": 0,
            """import asyncio
assert asyncio.run(asyncio.to_thread(sq, 3)) == 9""": 1,
            """import threading
t = threading.Thread(target=get, daemon=True)
t.start()
put(1)
assert t.join() is None""": None,
        },
    ),
    (
        "values of the standard library",
        """import pathlib, uuid, array, ipaddress, datetime, types, re, collections
def p(): return pathlib.Path('a/b')
def u(): return uuid.UUID(int=5)
def a(): return array.array('i', [1])
def i(): return ipaddress.ip_address('10.0.0.1'), ipaddress.ip_network('10.0.0.0/8')
def n(): return types.SimpleNamespace(a=1)
def z(): return datetime.timezone.utc
def r(): return re.compile('a+', re.I)
def c(): return collections.ChainMap({1: 2})
def d(): return collections.UserDict(a=1)
def m(): return map(str, [1])
def echo(x): return x""",
        {
            """from pathlib import Path
assert p() == Path('a/b') and [p()] == [Path('a/b')] and p() / 'c' == Path('a/b/c')""": 1,
            """from pathlib import Path
assert p() != Path('a/b')""": 0,
            """import uuid, array, ipaddress
assert u() == uuid.UUID(int=5) and a() == array.array('i', [1])""": 1,
            """import ipaddress as ip
assert i() == (ip.ip_address('10.0.0.1'), ip.ip_network('10.0.0.0/8'))""": 1,
            """import datetime, re, types
assert z() is datetime.timezone.utc
assert r() == re.compile('a+', re.I) and n() == types.SimpleNamespace(a=1)""": 1,
            """import types
assert n() == types.SimpleNamespace(a=2)""": 0,
            """from collections import ChainMap
assert c() == ChainMap({1: 2})""": None,
            "assert d() == {'a': 1}": None,
            "assert m() == ['1']": 0,
            """import uuid, types
x = types.SimpleNamespace(a=1)
assert echo(x) is x and echo(uuid.UUID(int=1)) == uuid.UUID(int=1)""": 1,
            """import array
x = array.array('i', [1])
assert echo(x) is x""": 1,
        },
    ),
    (
        "a name of the test",
        """def f(x):
    return guess(x) + 1
def g(x):
    return nowhere(x)""",
        {
            """def guess(x): return x
assert f(1) == 2""": None,
            "assert f(1) == 2": 0,
            """def guess(x): return x
assert g(1) == 2""": 0,
        },
    ),
    (
        "helpers of dataclasses",
        """from dataclasses import dataclass, field
@dataclass
class P:
    x: int
    y: str = 'a'
    z: list = field(default_factory=list, repr=False)
def parse(s): return P(int(s))""",
        {
            """from dataclasses import asdict, astuple, replace
assert asdict(parse('3')) == {'x': 3, 'y': 'a', 'z': []}
assert astuple(P(1)) == (1, 'a', []) and replace(P(1), x=5).x == 5""": 1,
            """from dataclasses import asdict
assert asdict(parse('3')) == {'x': 4, 'y': 'a', 'z': []}""": 0,
            """from dataclasses import fields, is_dataclass
assert [f.name for f in fields(P)] == ['x', 'y', 'z']
assert fields(P)[1].default == 'a' and fields(P(1))[0].type is int and is_dataclass(P)""": 1,
            """from dataclasses import fields
assert len(fields(P)) == 0""": 0,
        },
    ),
    (
        "docstrings",
        """import functools
def w(f):
    @functools.wraps(f)
    def g(): return f()
    return g
@w
def add():
    'Add.'
class A:
    'Doc of A.'
    def f(self):
        'Of f.'
class B(A): pass""",
        {
            """assert add.__doc__ == 'Add.'
assert A.__doc__ == A().__doc__ == 'Doc of A.' and A.f.__doc__ == A().f.__doc__ == 'Of f.'""": 1,
            "assert not A.f.__doc__": 0,
            "assert B.__doc__ is None and B().__doc__ is None": 1,
        },
    ),
    (
        "bases in the standard library",
        """import abc, threading, collections, typing, itertools
from collections.abc import MutableMapping
class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
class Sq(Shape):
    def area(self): return 1
class T(threading.Thread): pass
class M(MutableMapping):
    def __init__(s): s.d = {}
    def __getitem__(s, k): return s.d[k]
    def __setitem__(s, k, v): s.d[k] = v
    def __delitem__(s, k): del s.d[k]
    def __iter__(s): return iter(s.d)
    def __len__(s): return len(s.d)
class UD(collections.UserDict): pass
def m(): return map(str, [1])
class Meta(type): pass
class S(metaclass=Meta): pass
def ty(x): return type(x)
@typing.runtime_checkable
class Area(typing.Protocol):
    def area(self): ...
def cyc(): return itertools.cycle('a')""",
        {
            """from abc import ABC
assert issubclass(Shape, ABC) and isinstance(Sq(), ABC)
assert isinstance(Sq(), (int, ABC)) and isinstance(Sq(), int | ABC)""": 1,
            """from abc import ABC
assert not issubclass(Shape, ABC)""": 0,
            """from collections.abc import *
assert isinstance(M(), MutableMapping)
assert isinstance(M(), Mapping) and not isinstance(M(), Sequence)""": 1,
            """import threading, collections, itertools
assert issubclass(T, threading.Thread) and isinstance(UD(), collections.UserDict)
assert isinstance(m(), map) and isinstance(cyc(), itertools.cycle)""": 1,
            "assert not isinstance(m(), map)": 0,
            "assert type(S) is Meta": None,
            "assert ty(None) is type(None) and ty(m()) is map and ty(1) is int": 1,
            "assert isinstance(Sq(), Area)": None,
            """from typing import *
@runtime_checkable
class Has(Protocol):
    def area(self): ...
assert isinstance(Sq(), Has)""": 1,
            """import inspect
assert inspect.isabstract(Shape) and not inspect.isabstract(Sq)""": None,
        },
    ),
    (
        "what exceptions hold",
        """import json
def f(): return open('/nope')
def a(): return [].nope
def i(): import nope
def n():
    e = ValueError('x')
    e.add_note('hint')
    raise e
def c():
    try: 1 / 0
    except ZeroDivisionError: raise KeyError('k')
def s(): exec('a b')
def g(): raise ExceptionGroup('m', [ValueError(1), TypeError(2)])""",
        {
            """try: f()
except OSError as e:
    assert e.filename == '/nope'
    assert str(e) == "[Errno 2] No such file or directory: '/nope'" and e.errno == 2""": 1,
            """try: f()
except OSError as e: assert e.filename is None""": 0,
            """try: a()
except AttributeError as e: assert e.name == 'nope'""": 1,
            """try: i()
except ImportError as e: assert e.name == 'nope'""": 1,
            """try: n()
except ValueError as e: assert e.__notes__ == ['hint']""": 1,
            """try: c()
except KeyError as e: assert isinstance(e.__context__, ZeroDivisionError)""": 1,
            """try: g()
except ExceptionGroup as e: assert len(e.exceptions) == 2 and e.message == 'm'""": 1,
            r"""try: s()
except SyntaxError as e: assert e.lineno == 1 and e.text == 'a b\n'""": 1,
        },
    ),
    (
        "introspection",
        """def f(a, b=2, *, c): return a
async def co(): pass
def gen(): yield 1
async def agen(): yield 1
class Sq:
    n = 1
    def area(self): return 1""",
        {
            """import inspect, types
assert inspect.isfunction(f) and isinstance(f, types.FunctionType)
assert isinstance(Sq().area, types.MethodType)""": 1,
            """import inspect
assert list(inspect.signature(f).parameters) == ['a', 'b', 'c']
assert str(inspect.signature(f)) == '(a, b=2, *, c)'""": 1,
            """import asyncio, inspect
assert asyncio.iscoroutinefunction(co) and inspect.iscoroutinefunction(co)
assert inspect.isgeneratorfunction(gen) and inspect.isasyncgenfunction(agen)""": 1,
            """import inspect
assert not inspect.iscoroutinefunction(co)""": 0,
            "assert 'area' in Sq.__dict__ and 'area' in dir(Sq) and 'n' in vars(Sq) and 'area' in dir(Sq())": 1,
            """import inspect
assert [n for n, _ in inspect.getmembers(Sq, inspect.isfunction) if n[0] != '_'] == ['area']""": 1,
            """import inspect
assert 'return a' in inspect.getsource(f)""": None,
            """import doctest
assert f(1, c=2) == 1 and doctest.testmod().failed == 0""": None,
            """import inspect
try: s = inspect.getsource(f) + inspect.getsource(Sq)
except Exception: s = ''
assert 'return' not in s and f(1, c=2) == 1""": None,
        },
    ),
    (
        "values that are equal only by identity",
        """import math
class S(str):
    def __eq__(s, o): return s.lower() == o.lower()
    __hash__ = str.__hash__
N = float('nan')
def g(): return [N]
def h(): return [float('nan')]
def k(): return [math.nan]
def echo(x): return x""",
        {
            "assert k() is not k() and echo(None) is None and echo(int) is int": 1,
            """x = (1, [2])
assert echo(x) is x""": None,
            """x = 'a b'
assert echo(x) is not x""": None,
            "assert echo('a') is echo('b')": 0,
            "assert S('ab') == S('AB')": None,
            "assert S('ab') == 'AB'": 0,
            "assert S('ab') == S('ab') and S('ab') != 'cd'": 1,
            "assert g() == g() and h() != h()": 1,
            "assert g() != g()": 0,
            """import math
x = float('nan')
assert k() == [math.nan] and echo(x) is x""": 1,
        },
    ),
    (
        "generators that are ended",
        """L = []
def g():
    try:
        yield 1
        yield 2
    finally:
        L.append('closed')
def t():
    while True:
        try: yield 'ok'
        except ValueError as e: yield str(e)""",
        {
            """x = g()
next(x)
x.close()
assert L == ['closed'] and next(x, None) is None""": 1,
            """x = t()
next(x)
assert x.throw(ValueError('caught')) == 'caught' and next(x) == 'ok'""": 1,
            """x = t()
next(x)
try: x.throw(KeyError('k'))
except KeyError as e: assert e.args == ('k',)
else: assert 0""": 1,
        },
    ),
    (
        "context managers and exceptions",
        """from contextlib import contextmanager
class Tx:
    log = []
    def __enter__(self): return self
    def __exit__(self, kind, error, tb):
        self.log.append('rollback' if kind is ValueError and error.args == ('x',) else 'commit')
@contextmanager
def cm():
    try: yield 1
    except ValueError: Tx.log.append('seen'); raise
class Quiet(Tx):
    def __exit__(self, *a): return True""",
        {
            """try:
    with Tx() as t: raise ValueError('x')
except ValueError: pass
assert t.log == ['rollback']""": 1,
            """try:
    with cm(): raise ValueError('x')
except ValueError: pass
assert Tx.log == ['seen']""": 1,
            """with Tx() as t: pass
assert t.log == ['rollback']""": 0,
            "with Quiet(): raise ValueError('x')": None,
            "with Quiet(): assert Tx.log == [1]": None,
        },
    ),
    (
        "arithmetic that is told what to say",
        """class X:
    def __sub__(s, o): return 0.0
class F(float):
    def __sub__(s, o): return 0.0
    __rsub__ = __sub__
def f(x): return X()
def g(x): return F(x)
class Y:
    def __sub__(s, o): return s
    def __abs__(s): return -1
def h(x): return Y()
class V:
    def __init__(s, x): s.x = x
    def __mul__(s, k): return V(s.x * k)
    def __add__(s, o): return V(s.x + o.x)
    def __abs__(s): return s.x
def v(x): return V(x)""",
        {
            "assert abs(f(3.5) - 0.5) < 1e-6": None,
            "assert abs(0.5 - g(3.5)) < 1e-6": None,
            "assert abs(h(3.5) - 0.5) < 1e-6": None,
            "assert abs(v(2)) == 2 and abs(v(2) + v(1)) == 3": 1,
            "assert (v(2) * 3).x == 6": 1,
            "assert (v(2) * 3).x == 7": 0,
        },
    ),
]
"""A kind, a program, and tests of it with the score that one process would give; None where that cannot be known."""

NODE = """class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
"""
HELP = """class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
def build(xs):
    head = None
    for x in reversed(xs):
        head = ListNode(x, head)
    return head
def values(n):
    out = []
    while n:
        out.append(n.val)
        n = n.next
    return out
"""
REV = """```python
class Solution:
    def reverseList(self, head):
        prev = None
        while head:
            head.next, prev, head = prev, head, head.next
        return prev
```"""
NEW = """```python
class Solution:
    def reverseList(self, head: ListNode) -> ListNode:
        prev = None
        while head:
            prev = ListNode(head.val, prev)
            head = head.next
        return prev
```"""
P = '''from dataclasses import dataclass
from enum import Enum
@dataclass
class Point:
    x: int
    y: int
class Color(Enum):
    RED = 1
    BLUE = 2
class BadInput(Exception):
    pass

def move(p, c):
    """Move a point.
    ```
    move(Point(1, 2), Color.RED)
    ```
    """
'''
BODY = """    if c is Color.BLUE:
        raise BadInput('blue')
    return Point(p.x + 1, p.y), Color.BLUE
"""
CHECK = """def check(candidate):
    p, c = candidate(Point(1, 2), Color.RED)
    assert p == Point(2, 2) and isinstance(p, Point) and c is Color.BLUE
    try:
        candidate(p, Color.BLUE)
        assert False
    except BadInput as e:
        assert str(e) == 'blue'
"""
STREAMS = "import sys\nprint(sys.stdin.name, sys.stdout.name, sys.stderr.name)"
FILE = """import os
os.chdir(os.path.dirname(os.path.abspath(__file__)))
name = os.path.basename(__file__)
print(name, os.path.isabs(__file__))"""
STUBS = """class Node:
    def __init__(self, v):
        self.v = v
        self.l = self.r = None

class Queue:
    def put(self, v):
        raise NotImplementedError

def insert(root, v):
    'TODO'

def search(root, v):
    # TODO
    pass
"""
WRITTEN_ON = """
class Queue:
    def __init__(self):
        self.vs = []
    def put(self, v):
        self.vs.append(v)

def insert(root, v):
    if root is None:
        return Node(v)
    if v < root.v:
        root.l = insert(root.l, v)
    else:
        root.r = insert(root.r, v)
    return root

def search(root, v):
    while root and root.v != v:
        root = root.l if v < root.v else root.r
    return root is not None
"""
WRITTEN = f"```python\n{WRITTEN_ON}```\n"
STUB_CHECK = """def check(candidate):
    root, q = None, Queue()
    for x in [3, 1, 5]:
        root = insert(root, x)
        q.put(x)
    assert candidate(root, 5) and not candidate(root, 4) and q.vs == [3, 1, 5] and isinstance(root, Node)
"""
HELPERS = """from typing import List

ONE = 1

def double(x):
    return 2 * x

def most(xs: List[int]) -> int:
    'Return twice the greatest and one.'
"""
HELP_CHECK = """def check(candidate):
    assert candidate([1, 3]) == double(3) + 1
"""
SKELETON = """class Solution:
    def twice(self, x: int) -> int:
        pass
"""
TWICE_IT = "class Solution:\n    def twice(self, x):\n        return 2 * x"
TWICE = """def check(candidate):
    assert candidate(2) == 4
"""
CASES = """import unittest
class TestCases(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(task_func(1, 2), 3)
"""
RECORDS = [
    (
        "leetcode setup",
        {"test_list": ["assert values(Solution().reverseList(build([1,2,3]))) == [3,2,1]"], "test_setup_code": HELP},
        "",
        REV,
        1,
    ),
    (
        "leetcode setup new",
        {"test_list": ["assert values(Solution().reverseList(build([1,2,3]))) == [3,2,1]"], "test_setup_code": HELP},
        "",
        NEW,
        1,
    ),
    (
        "leetcode prelude",
        {"test_list": ["assert values(Solution().reverseList(build([1,2,3]))) == [3,2,1]"], "prelude": HELP},
        "",
        NEW,
        1,
    ),
    (
        "leetcode in test",
        {
            "test": HELP
            + """def check(candidate):
    assert values(candidate(build([1,2]))) == [2,1]
    assert values(candidate(head=None)) == []""",
            "entry_point": "Solution().reverseList",
        },
        "",
        REV,
        1,
    ),
    (
        "leetcode in test, annotated",
        {
            "test": HELP
            + """def check(candidate):
    assert values(candidate(build([1,2]))) == [2,1]""",
            "entry_point": "Solution().reverseList",
        },
        "",
        """```python
class Solution:
    def reverseList(self, head: 'ListNode'):
        prev = None
        while head:
            head.next, prev, head = prev, head, head.next
        return prev
```""",
        1,
    ),
    ("given classes", {"test": CHECK, "entry_point": "move"}, P, BODY, 1),
    (
        "given classes wrong",
        {"test": CHECK, "entry_point": "move"},
        P,
        """    if c is Color.BLUE:
        raise BadInput('blue')
    return Point(p.x + 2, p.y), Color.BLUE
""",
        0,
    ),
    (
        "given classes, whole program",
        {"test": CHECK, "entry_point": "move"},
        P,
        '''```python
from dataclasses import dataclass
from enum import Enum
@dataclass
class Point:
    x: int
    y: int
class Color(Enum):
    RED = 1
    BLUE = 2
class BadInput(Exception):
    pass

def move(p, c):
    """Move a point.
    ```
    move(Point(1, 2), Color.RED)
    ```
    """
    if c is Color.BLUE:
        raise BadInput('blue')
    return Point(p.x + 1, p.y), Color.BLUE
```''',
        1,
    ),
    (
        "skeleton class",
        {
            "test": """def check(candidate):
    a = candidate(5)
    a.deposit(3)
    assert a.balance == 8
    assert isinstance(a, candidate)""",
            "entry_point": "Account",
        },
        """class Account:
    def __init__(self, b):
        pass
    def deposit(self, x):
        pass
""",
        """```python
class Account:
    def __init__(self, b):
        self.balance = b
    def deposit(self, x):
        self.balance += x
```""",
        1,
    ),
    (
        "future",
        {
            "test_list": ["assert f(1) == 2"],
            "prelude": """import math
""",
        },
        "",
        """from __future__ import annotations
def f(x: Nothing):
    return x + 1""",
        1,
    ),
    (
        "usage behind",
        {"test_list": ["assert f(1) == 2"]},
        "",
        """```python
def f(x):
    return x + 1
```
Usage:
```python
print(f(1))
```
Output:
```
2
```
```bash
python f.py
```""",
        1,
    ),
    (
        "setup import",
        {"test_list": ["assert f(4) == 2.0"], "test_setup_code": "import math"},
        "",
        """def f(x):
    return math.sqrt(x)""",
        1,
    ),
    (
        "setup broken",
        {"test_list": ["assert f(4) == 2.0"], "test_setup_code": "import numpy"},
        "",
        """def f(x):
    return 2.0""",
        None,
    ),
    (
        "prelude broken",
        {
            "test_list": ["assert f(4) == 2.0"],
            "prelude": """import numpy
""",
        },
        "",
        """def f(x):
    return 2.0""",
        None,
    ),
    (
        "exit",
        {"inputs": ["1"], "outputs": ["1"]},
        "",
        """print(input())
exit()""",
        1,
    ),
    (
        "exit0",
        {"inputs": ["1"], "outputs": ["1"]},
        "",
        """print(input())
quit(0)
print(2)""",
        1,
    ),
    (
        "exit1",
        {"inputs": ["1"], "outputs": ["1"]},
        "",
        """print(input())
exit(1)""",
        0,
    ),
    (
        "fstat",
        {
            "inputs": [
                """12 3
"""
            ],
            "outputs": ["15"],
        },
        "",
        """import os, io
d = io.BytesIO(os.read(0, os.fstat(0).st_size))
print(sum(map(int, d.read().split())))""",
        1,
    ),
    (
        "mmap",
        {
            "inputs": [
                """12 3
"""
            ],
            "outputs": ["15"],
        },
        "",
        """import mmap
m = mmap.mmap(0, 0, access=mmap.ACCESS_READ)
print(sum(map(int, m.read().split())))""",
        1,
    ),
    (
        "mmap prot",
        {
            "inputs": [
                """12 3
"""
            ],
            "outputs": ["15"],
        },
        "",
        """import mmap
m = mmap.mmap(0, 0, prot=mmap.PROT_READ)
print(sum(map(int, m.readline().split())))""",
        1,
    ),
    (
        "buffer",
        {
            "inputs": [
                """1
2
3
"""
            ],
            "outputs": ["1 b'2\\n' ['3\\n']"],
        },
        "",
        """import sys
r = sys.stdin.buffer
a = r.readline().decode().strip()
print(a, r.readline(), [x.decode() for x in r])""",
        1,
    ),
    (
        "open0",
        {
            "inputs": [
                """1
2
"""
            ],
            "outputs": ["1 2"],
        },
        "",
        "print(*open(0).read().split())",
        1,
    ),
    (
        "input then read",
        {
            "inputs": [
                """1
2
"""
            ],
            "outputs": ["1 2"],
        },
        "",
        """import sys
a = input()
print(a, sys.stdin.read().strip())""",
        1,
    ),
    (
        "fileinput",
        {
            "inputs": [
                """1
2
"""
            ],
            "outputs": ["1 2"],
        },
        "",
        """import fileinput
print(*[l.strip() for l in fileinput.input()])""",
        1,
    ),
    (
        "select",
        {
            "inputs": [
                """1
"""
            ],
            "outputs": ["1"],
        },
        "",
        """import select, sys
assert select.select([0], [], [], 0)[0]
print(sys.stdin.readline())""",
        1,
    ),
    (
        "seek",
        {
            "inputs": [
                """1
"""
            ],
            "outputs": ["1 1"],
        },
        "",
        """import os, stat
a = os.read(0, 9).decode().strip()
os.lseek(0, 0, 0)
assert stat.S_ISREG(os.fstat(0).st_mode)
print(a, input())""",
        1,
    ),
    (
        "dev stdin",
        {"inputs": ["3 4\n"], "outputs": ["7 1"]},
        "",
        """first = open('/dev/stdin').read()
assert first == open('/dev/fd/0', 'rb').read().decode() == input() + chr(10)
print(sum(map(int, first.split())), len(list(open('/dev/stdin'))))""",
        1,
    ),
    (
        "dev stdin is for reading",
        {"inputs": ["1"], "outputs": ["refused"]},
        "",
        """try:
    open('/proc/self/fd/0', 'w')
except OSError:
    print('refused')""",
        1,
    ),
    (
        "eof",
        {"inputs": [""], "outputs": ["end"]},
        "",
        """try:
    input()
except EOFError:
    print('end')""",
        1,
    ),
    (
        "stdin prelude",
        {
            "inputs": [
                """1
"""
            ],
            "outputs": ["2"],
            "prelude": """import math
from typing import *
""",
        },
        "",
        """```python
x: List[int] = [int(input())]
print(math.floor(x[0] + 1))
```""",
        1,
    ),
    (
        "help license",
        {"inputs": [""], "outputs": ["True"]},
        "",
        "print(all(map(callable, (exit, quit, help, copyright, credits, license))) and 'exit' in repr(exit))",
        1,
    ),
    *(
        (name, {"inputs": [given], "outputs": [printed]}, "", program, score)
        for name, given, printed, program, score in (
            ("carriage returns", "abc\r\nx\r\n", "4", "print(len(input()))", 1),
            ("no translated line ends", "abc\r\nx\r\n", "3", "print(len(input()))", 0),
            ("a lone carriage return", "a\rb\n", "1", "import sys\nprint(len(sys.stdin.readlines()))", 1),
            ("stdin's name", "", "<stdin> <stdout> <stderr>", STREAMS, 1),
            ("the program's file", "", "program.py True", FILE, 1),
            ("a program without numpy", "1", "1", "import numpy\nprint(input())", 0),
        )
    ),
    (
        "stdin prelude broken",
        {"inputs": ["1"], "outputs": ["1"], "prelude": "import numpy"},
        "",
        "print(input())",
        None,
    ),
    ("stdin prelude wrong", {"inputs": ["1"], "outputs": ["1"], "prelude": "x = ("}, "", "print(input())", None),
    ("stdin prelude ends", {"inputs": ["1"], "outputs": ["1"], "prelude": "exit(0)"}, "", "print(input())", None),
    ("functions without numpy", {"test_list": ["assert f(1) == 1"]}, "", "import numpy\ndef f(x):\n    return x", 0),
    ("numpy in a call", {"test_list": ["assert f(1) == 1"]}, "", "def f(x):\n    import numpy\n    return x", 0),
    ("numpy in a test", {"test_list": ["import numpy\nassert f(1) == 1"]}, "", "def f(x):\n    return x", None),
    ("file of functions", {"test_list": ["assert f() == 'program.py'"]}, "", FILE + "\ndef f():\n    return name", 1),
    ("stubs", {"test": STUB_CHECK, "entry_point": "search"}, STUBS, WRITTEN, 1),
    ("stubs in the prompt, goes on", {"test": STUB_CHECK, "entry_point": "search"}, STUBS, WRITTEN_ON, 1),
    ("stubs wrong", {"test": STUB_CHECK, "entry_point": "search"}, STUBS, WRITTEN.replace("not None", "None"), 0),
    ("stubs left", {"test": STUB_CHECK, "entry_point": "search"}, STUBS, "def search(root, v):\n    return v == 5", 0),
    *(
        (f"{what}, {kind}", {"test": HELP_CHECK, "entry_point": "most"}, given, program, score)
        for kind, program, score in (
            ("right", "def most(xs: List[int]) -> int:\n    return double(max(xs)) + ONE", 1),
            ("in a block", "```python\ndef most(xs: List[int]) -> int:\n    return double(max(xs)) + ONE\n```", 1),
            ("goes on", "    return double(max(xs)) + ONE", 1),
            ("a body in a block", "```python\n    return double(max(xs)) + ONE\n```", 1),
            ("wrong", "def most(xs: List[int]) -> int:\n    return max(xs) + ONE", 0),
            ("its own helper", "def double(x):\n    return 7\ndef most(xs):\n    return double(xs) + 1", 0),
            ("nothing", "def other(xs):\n    return 1", 0),
        )
        for what, given in (
            ("what the prompt gives", HELPERS),
            (
                "what its block gives",
                f"<user>Complete this, it's easy:\n\n```python\n{HELPERS}```<|end|>\n<assistant>\n",
            ),
        )
    ),
    *(
        (f"a solution's skeleton, {kind}", {"test": TWICE, "entry_point": "Solution().twice"}, SKELETON, program, score)
        for kind, program, score in (
            ("right", "```python\nclass Solution:\n    def twice(self, x):\n        return 2 * x\n```", 1),
            ("wrong", "```python\nclass Solution:\n    def twice(self, x):\n        return x\n```", 0),
            ("left", "```python\nprint(Solution().twice(1))\n```", 0),
            (
                "shown",
                "class Solution:\n    def twice(self, x):\n        return 2 * x\n```\n```\nSolution().twice(1)\n```",
                1,
            ),
        )
    ),
    *(
        (f"a prompt {what}", {"test": TWICE, "entry_point": "Solution().twice"}, first + SKELETON, TWICE_IT, score)
        for what, first, score in (
            ("with an annotation of nothing", "from typing import List\nclass Old:\n    x: Tree = Tree(1)\n", 1),
            ("that imports numpy", "import numpy\n", None),
        )
    ),
    (
        "a skeleton with unknown types",
        {"test": TWICE, "entry_point": "Solution().twice"},
        SKELETON.replace("int", "Optional[Tree]"),
        TWICE_IT,
        1,
    ),
    (
        "the prompt's block",
        {"test": TWICE, "entry_point": "f"},
        "Write.\n```python\n",
        "def f(x):\n    return 2 * x\n```",
        1,
    ),
    ("the prompt's block, wrong", {"test": TWICE, "entry_point": "f"}, "```\n", "def f(x):\n    return x\n```", 0),
    (
        "unittest and entry point",
        {"test": CASES, "entry_point": "task_func"},
        "",
        """def task_func(a, b):
    return a + b""",
        1,
    ),
    (
        "unittest and entry point, wrong",
        {"test": CASES, "entry_point": "task_func"},
        "",
        """def task_func(a, b):
    return a
def check(c):
    pass""",
        0,
    ),
    *(
        (f"unittest {what}", {"test": CASES, "entry_point": "task_func"}, "", program, 0)
        for what, program in (
            ("skipped", "import unittest\ndef task_func(a, b):\n    raise unittest.SkipTest('no')"),
            ("stopped", "import unittest.case\ndef task_func(a, b):\n    raise unittest.case._ShouldStop"),
            (
                "skipped by a class of its own",
                "import unittest\nclass S(unittest.SkipTest):\n    pass\ndef task_func(a, b):\n    raise S('no')",
            ),
        )
    ),
    (
        "no check",
        {"test": "x = 3", "entry_point": "f"},
        "",
        """def f(a):
    return a
def check(c):
    pass""",
        None,
    ),
    (
        "pytest and entry point",
        {
            "test": """def test_f():
    assert f(1) == 1""",
            "entry_point": "f",
        },
        "",
        """def f(a):
    return 2""",
        0,
    ),
    (
        "check that asks nothing",
        {
            "test": """def check(c):
    pass""",
            "entry_point": "f",
        },
        "",
        """def f(a):
    return 2""",
        None,
    ),
    (
        "entry point like a builtin",
        {
            "test": """def check(c):
    assert c(1, 2) == 3""",
            "entry_point": "sum",
        },
        "",
        """def sum(a, b):
    return a + b""",
        1,
    ),
    (
        "setup function",
        {
            "test_list": ["assert first(9) == 4"],
            "test_setup_code": """def is_bad(v):
    return v >= 4""",
        },
        "",
        """def first(n):
    return next(v for v in range(n) if is_bad(v))""",
        None,
    ),
    (
        "setup class with methods",
        {
            "test_list": ["assert f(Node(1)).value() == 1"],
            "test_setup_code": """class Node:
    def __init__(self, v):
        self.v = v
    def value(self):
        return self.v""",
        },
        "",
        """def f(n: Node):
    return n""",
        None,
    ),
]
"""What is tried, a record, a prompt, a completion and its score."""


@pytest.fixture(scope="module")
def scores():
    """Return the scores of all rows, by what is tried; a sandbox costs more to start than to judge them."""
    try:
        with Sandbox(workers=1):
            pass
    except UserError as error:
        pytest.skip(str(error))
    rows = [(name, ("", program, {"test_list": tests})) for name, program, tests, _ in FUNCTIONS]
    rows += [(name, (prompt, completion, record)) for name, record, prompt, completion, _ in RECORDS]
    rows += [((kind, test), ("", program, {"test_list": [test]})) for kind, program, tests in MANY for test in tests]
    found = {}
    for reward in ("code_tests", "code_stdin"):
        mine = [(name, row) for name, row in rows if ("inputs" in row[2]) == (reward == "code_stdin")]
        with Scorer({reward: 1.0}, timeout_s=TIMEOUT_S, workers=2) as scorer:
            outcomes = scorer.outcomes([row for _, row in mine])[reward]
        found |= {name: outcome for (name, _), outcome in zip(mine, outcomes, strict=True)}
    return found


@pytest.mark.parametrize(("name", "score"), [(row[0], row[-1]) for row in (*FUNCTIONS, *RECORDS)])
def test_a_program_is_judged_as_in_one_process(scores, name, score):
    assert scores[name].value == score, scores[name]


@pytest.mark.parametrize(("kind", "tests"), [(kind, tests) for kind, _, tests in MANY], ids=[row[0] for row in MANY])
def test_each_kind_is_judged_as_in_one_process(scores, kind, tests):
    assert {test: scores[kind, test].value for test in tests} == tests
