def check(
