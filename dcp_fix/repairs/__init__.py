"""The repairs of a vLLM that lacks them, each a function of one of its modules, in memory.

Begin with repairs.py; launcher.py is our fused kernel under the signature of vLLM's own, signature.py knows that
signature over the releases. The doctor tries them on a target, the plugin on a running vLLM.
Not here: when they are applied (plugin/).
"""
