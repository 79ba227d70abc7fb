"""What triton compiles, one file an idea; imported by `launch.py` alone, when a kernel runs."""
