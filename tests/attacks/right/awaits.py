import asyncio
async def later(x):
    await asyncio.sleep(0.01)
    return x + 1
def f(x):
    return asyncio.run(later(x))
