"""What runs inside the sandbox. Standard library only: nothing else is there."""
