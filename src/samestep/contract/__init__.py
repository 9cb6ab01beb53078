"""The contract of task.py, and the dtypes of the weights that train.

    contract.Task              its functions: what each gets and returns, with shapes and units
    contract.check_functions   at each start, before anything is read
    contract.bind              the functions with cfg and data, as the library calls them
    dtypes.split_by_decay      weights with weight decay, and those without

What a function gives wrongly is one line, which names the function and what to give.
"""
