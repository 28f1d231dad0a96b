"""The fixes as a vLLM general plugin: installed beside vLLM, it repairs at start what that release lacks.

Begin with plugin.py; put_back.py puts historical defects back through the same hooks, for the ladder in real vLLM;
pack.py is opt-in: FlashMLA is given no holes. Not here: the repairs themselves (repairs/).
"""
