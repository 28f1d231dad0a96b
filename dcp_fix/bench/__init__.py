"""What things cost on a GPU: exact mode beside the ordinary combine, our kernels beside those that ship.

Begin with exact_cost.py and kernel_bench.py (its sizes: kernel_cases.py; what ships: upstream.py); costs.py has what
`multi-gpu` times. Right comes first: nothing is timed that was not compared with fp64.
Not here: any test. No test asserts seconds.
"""
